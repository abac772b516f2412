// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/learning_rates.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <map>
#include <string>

namespace gradaccum {

/// Policy: sets the learning rate before each update.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::Schedule{ga::lr::Cosine{.peak = 3e-4, .warmup = 100, .total = 5000}});
///     trainer.fit(batches);
///     ga::Schedule halves{[](std::int64_t update) { return 1e-2 * std::pow(0.5, update / 1000); }};
///
/// `rate` is any function of the update's index, counted from 0 without skipped windows. Parameter groups keep the
/// ratios of their rates, see `LearningRates`; `ga::lr::ByName` sets those of several optimizers one by one. Loading a
/// state sets the rate from this schedule, which may differ from the saved run's. If `.total` is not set, the trainer
/// predicts it at the start of each epoch from the limits of `fit`, the batches and `Accumulate`, and throws if it
/// cannot.
///
/// @note Does not synchronize.
template <class Rate>
class Schedule {
  static constexpr bool by_name = std::same_as<Rate, lr::ByName>;
  static_assert(by_name || std::is_invocable_r_v<double, Rate&, std::int64_t>,
                "Schedule: the rate must be a function of the update, double(std::int64_t), or a ga::lr::ByName");

 public:
  static constexpr std::string_view name = "schedule";

  Schedule(Rate rate = {}) : rate_(std::move(rate)) {}  // NOLINT(google-explicit-constructor): a rate is one

  void attach(TrainerBase& trainer) {
    trainer_ = &trainer;
    if constexpr (by_name) {
      TORCH_CHECK(!rate_.empty(), "Schedule: rates by name must name an optimizer, got none");
      for (auto& [optimizer, rate] : rate_) {
        TORCH_CHECK(rate, "Schedule: the rate of ", optimizer, " must be a function, got an empty one");
        rates_.emplace(optimizer, trainer.learning_rates(optimizer));
        trainer.will_set_learning_rate(optimizer);
      }
    } else {
      rates_.emplace("all", trainer.learning_rates());
      trainer.will_set_learning_rate();
    }
    trainer.when_built([this] { set(trainer_->updates()); });
  }
  void on_epoch_begin(std::int64_t) {
    if (!takes_total()) return;
    epoch_begin_ = trainer_->updates();
    plan();
  }
  void on_epoch_end(std::int64_t) { epoch_begin_.reset(); }
  void before_backward(Loss&) const {
    TORCH_CHECK(total_ || !takes_total(), "Schedule: .total must be given to call step() outside of fit()");
  }
  void after_step(const Step& step) { set(step.update); }
  void state(Archive& archive) {
    const bool in_fit = takes_total() && trainer_->progress().running;
    auto begin = in_fit ? epoch_begin_ : std::nullopt;
    auto at = archive.loading() ? std::nullopt : std::optional(trainer_->updates());
    archive("epoch_begin", begin);  // empty between epochs
    archive("updates", at);         // a part without any value would be ignored if changes are allowed
    for (auto& [optimizer, rates] : rates_)
      if (const auto part = "rates." + optimizer; !archive.loading() || archive.has(part)) archive(part, rates);
    if (!archive.loading()) return;
    archive.leave_out("rates");  // of another kind of schedule
    TORCH_CHECK(begin || !in_fit || trainer_->progress().batch == 0,
                "Schedule: .total must be given to resume in the middle of an epoch, as it was in the saved run");
    archive.when_all_fit([this, begin, in_fit, anew = archive.changes_allowed()] {
      if (!takes_total()) return set(trainer_->updates());
      epoch_begin_ = begin;
      if (!begin || !in_fit) return;  // the start of the next epoch plans
      if (anew) epoch_begin_ = trainer_->updates_at_epoch_begin();
      plan();
    });
  }

 private:
  static constexpr bool has_total = requires(Rate & given) { given.total = std::int64_t{}; };

  bool takes_total() const {
    if constexpr (has_total) return rate_.total == 0;
    return false;
  }
  void plan() {
    total_ = trainer_->planned_updates(epoch_begin_.value());
    TORCH_CHECK(total_,
                "Schedule: .total must be given, since the number of updates of this fit is not known: that takes only "
                ".epochs or .updates, batches with size(), and ga::Accumulate{.steps}");
    set(trainer_->updates());
  }
  void set(std::int64_t update) {
    if constexpr (by_name) {
      for (auto& [optimizer, rate] : rate_) rates_.at(optimizer).set(rate(update));
      return;
    } else if constexpr (has_total) {
      if (takes_total()) {
        auto whole = rate_;
        whole.total = std::max<std::int64_t>(total_.value_or(std::numeric_limits<std::int64_t>::max()), 1);
        return rates_.at("all").set(whole(update));
      }
    }
    if constexpr (!by_name) rates_.at("all").set(rate_(update));
  }

  Rate rate_;
  std::map<std::string, LearningRates> rates_;  // by optimizer, or of all
  const TrainerBase* trainer_ = nullptr;
  std::optional<std::int64_t> total_, epoch_begin_;  // updates, for a rate whose total is not set
};

/// Lowers the learning rates when a number no longer improves: a policy that also works in a loop of your own.
///
///     ga::LearningRates rates(optimizer);
///     ga::ReduceLROnPlateau::Running plateau({.factor = 0.5, .patience = 1});
///     for (double loss : {0.9, 0.7, 0.8, 0.75}) plateau.step(loss, rates);   // of an evaluation, once an epoch
///     std::cout << rates.current() << ", since " << plateau.best();          // half of what it was, since 0.7
///
/// It behaves like PyTorch's `ReduceLROnPlateau` with the same options. A number is better if it is lower (or higher,
/// by `mode`) than the best so far by more than `threshold`, which is a fraction of the best if `relative`; NaN never
/// is. After more than `patience` numbers in a row without improvement, each group's rate is multiplied by `factor`,
/// and the next `cooldown` numbers are not counted. As a policy it takes its numbers from `Validate`, and is saved in
/// states. A Trainer can have either this policy or a `Schedule`.
struct ReduceLROnPlateau {
  static constexpr std::string_view name = "schedule";

  std::string metric = "loss";    ///< name in `Validate`: `loss`, or `test/loss` of a Validate named `test`
  std::optional<Mode> mode = {};  ///< whether lower or higher is better; optional if the metric defines it
  double factor = 0.1;            ///< in (0, 1)
  std::int64_t patience = 10;     ///< numbers without improvement that are tolerated, >= 0
  double threshold = 1e-4;        ///< least improvement, >= 0
  bool relative = true;           ///< PyTorch's threshold_mode: true is "rel", false is "abs"
  std::int64_t cooldown = 0;      ///< numbers that are not counted after lowering the rates, >= 0
  double min_lr = 0;              ///< no rate is lowered below it, >= 0
  double eps = 1e-8;              ///< a rate that would fall by this or less is unchanged

  class Running;
};

/// A ReduceLROnPlateau in a Trainer, or in a loop of your own.
class ReduceLROnPlateau::Running : public ReduceLROnPlateau {
 public:
  using Options = ReduceLROnPlateau;
  explicit Running(ReduceLROnPlateau given);

  /// Adds a number. Returns true if the rates were due to be lowered.
  bool step(double number, LearningRates& lowered);
  double best() const { return best_; }  ///< the best number so far; NaN if there is none

  void state(Archive& archive);
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

 private:
  void check() const;

  double best_ = std::numeric_limits<double>::quiet_NaN();
  std::int64_t num_bad_epochs_ = 0, cooldown_counter_ = 0;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/reduce_lr_on_plateau.ipp>
#endif
