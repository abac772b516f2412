// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/metrics.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <tuple>

namespace gradaccum {

/// Options of `Validate`: when to evaluate, which weights, and the name of the results.
struct ValidateOptions {
  std::optional<std::int64_t> every_updates = {};  ///< updates between two evaluations, >= 1
  std::optional<std::int64_t> every_epochs = {};   ///< epochs between two evaluations, >= 1; 1 if neither is set
  bool ema = false;                                ///< evaluate the averages of the trainer's `Ema`
  std::string name = "validation";                 ///< prefix of the metrics' names, as in `validation/loss`
};

namespace detail {

void check_options(const ValidateOptions& options);

/// Returns a guard for an evaluation during training. It puts averages into the model, if there are any, and at its end
/// restores the weights and the random number generators.
std::shared_ptr<void> validating_scope(torch::nn::Module& module, Ema::Running* ema);

}  // namespace detail

/// Policy: evaluates the model during `fit`, and passes the results to the report and the other policies.
///
///     ga::data::TensorBatches unseen(x, y, {.batch_size = 4});
///     ga::Trainer trainer(model, sgd, objective, ga::Validate(unseen, {.every_updates = 5}),
///                         ga::EarlyStopping{.patience = 3});
///     auto report = trainer.fit(batches, {.epochs = 3});
///     for (auto& validation : report.validations) std::cout << validation.update << ": " << validation.found << '\n';
///
/// The arguments are batches, optional `ValidateOptions`, and metrics, as for `Trainer::evaluate`. Batches passed as an
/// lvalue are held by reference; they must not be the training's. Evaluates as the options say and at the end of `fit`,
/// at most once per update. Results go to the FitReport and to each policy with
/// `on_validation(const ga::Validation&)`, before a state is saved. A Trainer may have several with different names.
///
/// The training is bitwise unaffected. Batches of `ga::data` are always in the order of their first epoch.
///
/// Resuming. A signal interrupts an evaluation at its next batch; a resumed run evaluates again.
///
/// Ranks. With `DataParallel` each rank evaluates its share of the batches, and results are over all shares. Metrics
/// need `reduce` then.
///
/// @note Synchronizes with the device when it evaluates. With `ema`, an evaluation takes memory for a copy of the
/// model.
template <class Batches, class... Metrics>
class Validate {
 public:
  ValidateOptions options;

  explicit Validate(Batches&& batches, Metrics... metrics)
      : Validate(std::forward<Batches>(batches), ValidateOptions(), std::move(metrics)...) {}
  Validate(Batches&& batches, ValidateOptions given, Metrics... metrics)
      : options(std::move(given)), batches_(std::forward<Batches>(batches)), metrics_(std::move(metrics)...) {}

  void attach(auto& trainer) {
    detail::check_options(options);
    const auto announce = [&]<class M>(const M& metric) {
      if constexpr (gradaccum::metric<M> && detail::finds_number<M>)
        trainer.will_validate(options.name, std::string(metric.name), detail::mode_told_by(metric));
    };
    announce(MeanLoss());
    std::apply([&](const auto&... metrics) { (announce(metrics), ...); }, metrics_);
    auto* const ema = options.ema ? trainer.template find_policy<Ema>() : nullptr;
    TORCH_CHECK(ema || !options.ema, "Validate: ema needs the averages of a ga::Ema; give the trainer that policy");
    evaluate_ = [this, ema, &trainer] {
      const auto scope = detail::validating_scope(trainer.module(), ema);
      begin_again();
      const auto evaluate = [&](const auto&... metrics) { return trainer.validate(batches_, metrics...); };
      return std::apply(evaluate, metrics_);
    };
    trainer_ = &trainer;
  }

  void after_step(const Step& step) {
    due_ = due_ || (options.every_updates && step.update % *options.every_updates == 0);
  }
  int fit_scope() {
    trained_ = false;
    return 0;
  }
  void after_window(const Step&) {
    trained_ = true;
    due_ = due_ || trainer_->progress().options.smoke;
  }
  void on_epoch_end(std::int64_t epoch) { due_ = due_ || is_due_after(epoch); }
  void before_boundary() {
    const bool due = std::exchange(due_, false) || was_due();
    if ((!due && !at_end()) || is_known(due)) return;
    if (auto found = evaluate_()) trainer_->validated(options.name, std::move(*found), due);
  }

 private:
  /// Makes the next loop over the batches repeat their first epoch, if they can.
  void begin_again() {
    using Bare = std::remove_reference_t<Batches>;
    if constexpr (requires { batches_.load_state(typename Bare::State()); })
      batches_.load_state(typename Bare::State());
  }
  /// An epoch that a limit has cut short is not over: a later fit trains with the rest.
  bool is_due_after(std::int64_t epoch) const {
    const auto& progress = trainer_->progress();
    if (progress.stopped || (progress.options.updates && progress.updates >= *progress.options.updates)) return false;
    return (options.every_epochs || !options.every_updates) && (epoch + 1) % options.every_epochs.value_or(1) == 0;
  }
  /// Returns true after loading a state that was saved when a signal interrupted an evaluation.
  bool was_due() const {
    const auto& progress = trainer_->progress();
    if (progress.resumed_from.empty() || trained_ || progress.updates == 0) return false;
    return (options.every_updates && trainer_->updates() % *options.every_updates == 0) ||
           (progress.epochs > 0 && progress.batch == 0 && is_due_after(progress.epoch));
  }
  /// Returns true if this `fit` has trained, and will not update the parameters again.
  bool at_end() const {
    const auto& progress = trainer_->progress();
    const bool has_tail = progress.options.tail == Tail::flush && trainer_->window().micro_batches > 0;
    return progress.done() && progress.signal() == 0 && progress.updates > 0 && !has_tail;
  }
  /// Returns true if there is a result for this update: of the epoch's last window, or from before a resume.
  bool is_known(bool due) const {
    const auto& all = trainer_->progress().validations;
    return std::any_of(all.rbegin(), all.rend(), [&, update = trainer_->updates()](const Validation& one) {
      return one.name == options.name && one.update == update && (one.due || !due);
    });
  }

  Batches batches_;
  std::tuple<Metrics...> metrics_;
  std::function<std::optional<Evaluation>()> evaluate_;
  TrainerBase* trainer_ = nullptr;
  bool due_ = false;
  bool trained_ = false;  // this `fit` has closed a window
};

template <class Batches, class... Metrics>
explicit Validate(Batches&&, Metrics...) -> Validate<Batches, Metrics...>;
template <class Batches, class... Metrics>
Validate(Batches&&, ValidateOptions, Metrics...) -> Validate<Batches, Metrics...>;

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/validate.ipp>
#endif
