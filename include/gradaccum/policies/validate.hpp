// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum {

struct Ema;

/// When it is evaluated, of which weights, and what the numbers are called.
struct ValidateOptions {
  std::optional<std::int64_t> every_updates = {};  ///< >= 1
  std::optional<std::int64_t> every_epochs = {};   ///< >= 1; 1 if neither is given
  bool ema = false;                                ///< evaluates the averages of the trainer's `Ema`
  std::string name = "validation";                 ///< the first part of its numbers' names: `validation/loss`
};

namespace detail {

void check_options(const ValidateOptions& options);

/// Returns a guard for an evaluation in the middle of a training: the averages are in the model, if there are any, and
/// random numbers are afterwards as before.
std::shared_ptr<void> validating_scope(torch::nn::Module& module, Ema* ema);

}  // namespace detail

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
    detail::check_options(options);
    trainer.will_validate(options.name, names());
    auto* const ema = options.ema ? trainer.template find_policy<Ema>() : nullptr;
    TORCH_CHECK(ema || !options.ema,
                "Validate: ema is of the averages that the trainer's policy ga::Ema has; give it one");
    evaluate_ = [this, ema, &trainer] {
      const auto scope = detail::validating_scope(trainer.module(), ema);
      begin_again();
      const auto evaluate = [&](const auto&... metrics) { return trainer.evaluate_on_all(batches_, metrics...); };
      return std::apply(evaluate, metrics_);
    };
    trainer_ = &trainer;
  }

  void after_step(const Step& step) {
    due_ = due_ || (options.every_updates && step.update % *options.every_updates == 0);
  }
  void after_window(const Step&) { due_ = due_ || trainer_->status().options.smoke; }
  void on_epoch_end(std::int64_t epoch) {
    if (options.every_epochs || !options.every_updates)
      due_ = due_ || (epoch + 1) % options.every_epochs.value_or(1) == 0;
  }
  void before_boundary() {
    if (std::exchange(due_, false) && !is_known()) trainer_->validated(options.name, evaluate_());
  }

 private:
  std::vector<std::string> names() const {
    const auto of = [](const auto&... metrics) {
      return std::vector{std::string(MeanLoss::name), std::string(metrics.name)...};
    };
    return std::apply(of, metrics_);
  }
  /// Makes the next loop over batches that know how the first one again.
  void begin_again() {
    using Bare = std::remove_reference_t<Batches>;
    if constexpr (requires { batches_.load_state(typename Bare::State()); })
      batches_.load_state(typename Bare::State());
  }
  /// It has been evaluated at this update: at the epoch's last window, say, or before a `fit` was resumed.
  bool is_known() const {
    const auto& all = trainer_->status().validations;
    return std::any_of(all.rbegin(), all.rend(), [update = trainer_->updates(), this](const Validation& one) {
      return one.name == options.name && one.update == update;
    });
  }

  Batches batches_;
  std::tuple<Metrics...> metrics_;
  std::function<Evaluation()> evaluate_;
  TrainerBase* trainer_ = nullptr;
  bool due_ = false;
};

template <class Batches, metric... Metrics>
explicit Validate(Batches&&, Metrics...) -> Validate<Batches, Metrics...>;
template <class Batches, metric... Metrics>
Validate(Batches&&, ValidateOptions, Metrics...) -> Validate<Batches, Metrics...>;

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/policies.ipp>
#endif
