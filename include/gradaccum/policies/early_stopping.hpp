// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <limits>

namespace gradaccum {

/// Ends a training that no longer improves: a policy that also works in a loop of your own.
///
///     ga::EarlyStopping::Running stopping({.patience = 2});
///     for (double loss : {0.9, 0.7, 0.8, 0.75, 0.6}) {      // of an evaluation, once an epoch
///       if (stopping.add(loss)) break;
///     }
///     std::cout << stopping.best() << ", " << stopping.waited() << " ago\n";   // 0.7, 2 ago
///
/// A number is better if it is lower (or higher, by `mode`) than the best so far by more than `min_delta`; NaN never
/// is. As a policy it takes its numbers from `Validate`. After `patience` validations without improvement `fit`
/// finishes the current window and stops, and its report says why. To keep the best parameters, add
/// `ga::SaveState{.directory = "runs/a", .keep_best = 1}`.
///
/// Resuming. A resumed `fit` continues the count, and trains no further if it was complete. Any other `fit` starts a
/// new count.
struct EarlyStopping {
  static constexpr std::string_view name = "early_stopping";

  std::string metric = "loss";    ///< name in `Validate`: `loss`, or `test/loss` of a Validate named `test`
  std::int64_t patience = 3;      ///< validations without improvement, >= 1
  double min_delta = 0;           ///< least improvement, >= 0
  std::optional<Mode> mode = {};  ///< whether lower or higher is better; optional if the metric defines it

  class Running;
};

/// An EarlyStopping in a Trainer, or in a loop of your own.
class EarlyStopping::Running : public EarlyStopping {
 public:
  using Options = EarlyStopping;
  explicit Running(EarlyStopping given);

  /// Adds a number. Returns true if training should stop.
  bool add(double number);
  bool is_over() const { return waited_ >= patience; }
  double best() const { return best_; }            ///< the best number so far; NaN if there is none
  std::int64_t waited() const { return waited_; }  ///< numbers since the best one
  std::string reason() const;                      ///< for the report of a fit

  void state(Archive& archive);
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

 private:
  struct InTrainer;
  void check() const;

  double best_ = std::numeric_limits<double>::quiet_NaN();
  std::int64_t best_update_ = 0, waited_ = 0;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/early_stopping.ipp>
#endif
