// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/validating_scope.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policy.hpp>

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum {

/// When it is evaluated, of which weights, and what the numbers are called.
struct ValidateOptions {
  std::optional<std::int64_t> every_updates = {};  ///< >= 1
  std::optional<std::int64_t> every_epochs = {};   ///< >= 1; 1 if neither is given
  bool ema = false;                                ///< of the averages of the trainer's `Ema`
  std::string name = "validation";                 ///< what its numbers are called: `validation/loss`
};

/// Policy: evaluates the model in the middle of `fit`, and tells everybody who looks at numbers.
///
///     ga::data::TensorBatches unseen(x, y, {.batch_size = 4});
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     }, ga::Validate(unseen, {.every_updates = 5}), ga::EarlyStopping{.patience = 3});
///     auto report = trainer.fit(batches, {.epochs = 3});
///     for (auto& validation : report.validations) std::cout << validation.update << ": " << validation.found << '\n';
///
/// `ga::Validate(batches, metrics…)`, `ga::Validate(batches, options, metrics…)`: what `Trainer::evaluate` takes.
/// Batches with a name are held by reference, others are taken over; not those that `fit` goes through. It evaluates
/// after every so many updates, at the end of every so many epochs, or both; at most once an update. What is found
/// reaches `EarlyStopping`, `SaveState`, `MetricsLog`, `Progress`, the FitReport, and each policy that has
/// `on_validation(const ga::Validation&)`, before the training is saved. There may be several, of different names.
///
/// The training goes on as if there had been none, to the bit: random numbers are as before. Batches of `ga::data` come
/// in the order of their first epoch each time. Of several processes each evaluates its share of the batches,
/// `DataParallel` given, and the numbers are those of all: metrics need `reduce` then.
///
/// @note Waits for the device when it evaluates. With `ema` the model is in memory once more meanwhile.
template <class Batches, metric... Metrics>
class Validate {
 public:
  ValidateOptions options;

  explicit Validate(Batches&& batches, Metrics... metrics)
      : Validate(std::forward<Batches>(batches), ValidateOptions(), std::move(metrics)...) {}
  Validate(Batches&& batches, ValidateOptions given, Metrics... metrics)
      : options(std::move(given)), batches_(std::forward<Batches>(batches)), metrics_(std::move(metrics)...) {}

  void attach(auto& trainer) {
    detail::check_when(options.every_updates, options.every_epochs, options.name);
    trainer.will_validate(options.name, names());
    auto* const ema = options.ema ? trainer.template find_policy<Ema>() : nullptr;
    TORCH_CHECK(ema || !options.ema,
                "Validate: ema is of the averages that the trainer's policy ga::Ema has; give it one");
    evaluate_ = [this, ema, &trainer] {
      const detail::ValidatingScope scope(trainer.module(), ema);
      detail::begin_again(batches_);
      const auto evaluate = [&](const auto&... metrics) { return trainer.evaluate_on_all(batches_, metrics...); };
      return std::apply(evaluate, metrics_);
    };
    tell_ = [this, &trainer](Evaluation found) { trainer.validated(options.name, std::move(found)); };
    status_ = &trainer.status();
    updates_ = [&trainer] { return trainer.updates(); };
  }

  void after_step(const Step& step) {
    due_ = due_ || (options.every_updates && step.update % *options.every_updates == 0);
  }
  void after_window(const Step&) { due_ = due_ || status_->options.smoke; }
  void on_epoch_end(std::int64_t epoch) {
    if (options.every_epochs || !options.every_updates)
      due_ = due_ || (epoch + 1) % options.every_epochs.value_or(1) == 0;
  }
  void before_boundary() {
    if (std::exchange(due_, false) && !is_known()) tell_(evaluate_());
  }

 private:
  std::vector<std::string> names() const {
    const auto of = [](const auto&... metrics) {
      return std::vector{std::string(MeanLoss::name), std::string(metrics.name)...};
    };
    return std::apply(of, metrics_);
  }
  /// It has been evaluated at this update: at the epoch's last window, say, or before a `fit` was resumed.
  bool is_known() const { return detail::knows(status_->validations, options.name, updates_()); }

  Batches batches_;
  std::tuple<Metrics...> metrics_;
  std::function<Evaluation()> evaluate_;
  std::function<void(Evaluation)> tell_;
  std::function<std::int64_t()> updates_;
  const FitStatus* status_ = nullptr;
  bool due_ = false;
};

template <class Batches, metric... Metrics>
explicit Validate(Batches&&, Metrics...) -> Validate<Batches, Metrics...>;
template <class Batches, metric... Metrics>
Validate(Batches&&, ValidateOptions, Metrics...) -> Validate<Batches, Metrics...>;

}  // namespace gradaccum
