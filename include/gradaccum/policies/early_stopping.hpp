// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <limits>

namespace gradaccum {

/// Ends a training that no longer gets better: a policy, and a part of one's own loop.
///
///     ga::EarlyStopping stopping{.patience = 2};
///     for (double loss : {0.9, 0.7, 0.8, 0.75, 0.6}) {      // of an evaluation, once an epoch
///       if (stopping.add(loss)) break;
///     }
///     std::cout << stopping.best << ", " << stopping.waited << " ago\n";   // 0.7, 2 ago
///
/// A number is better if it is lower by more than `min_delta` than the best so far, or higher, as `mode` says; NaN is
/// not. When `patience` numbers in a row were not better, that is the end: `fit` stops with the window in hand, and its
/// report says why. As a policy it gets its numbers from `Validate`. A `fit` that is resumed goes on counting, and does
/// nothing more after the end; each other `fit` begins anew. The best parameters are kept by
/// `ga::SaveState{.directory = "runs/a", .keep_best = 1}`.
struct EarlyStopping {
  static constexpr std::string_view name = "early_stopping";

  std::string metric = "loss";    ///< as `Validate` calls it: `loss`, or `test/loss` of one with another name
  std::int64_t patience = 3;      ///< >= 1
  double min_delta = 0;           ///< >= 0
  std::optional<Mode> mode = {};  ///< need not be given where the metric tells
  double best = std::numeric_limits<double>::quiet_NaN();  ///< not an option, like all below
  std::int64_t best_update = 0;                            ///< when that was
  std::int64_t waited = 0;                                 ///< numbers since then
  TrainerBase* trainer = nullptr;

  /// True if it is time to stop.
  bool add(double number);
  bool is_over() const { return waited >= patience; }
  std::string reason() const;
  /// Throws what is wrong with the options.
  Mode checked_mode() const;

  void attach(TrainerBase& to);
  int fit_scope();
  void on_validation(const Validation& validation);
  void state(Archive& archive);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/early_stopping.ipp>
#endif
