// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/any_batches.hpp>
#include <gradaccum/detail/trainer/parts.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/fit_report.hpp>

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace gradaccum {
class TrainerBase;
}

namespace gradaccum::detail {

/// One `fit` of a Trainer, which it is a friend of: the epochs, from the first or from a state on.
class Fit {
 public:
  Fit(TrainerBase& trainer, AnyBatches& batches);
  FitReport run(const FitOptions& options);

 private:
  /// An exception here is the end for other processes, too: they would wait for windows that never come.
  void or_give_up(c10::function_ref<void()> work);
  /// Policies begin the epoch before they are loaded: so they may do both.
  void resume();
  void begin_epoch(std::int64_t epoch);
  void run_epoch();
  /// With other processes, as long as they have batches.
  void go_along();
  void run_batches();
  void stop_at_limits();
  void at_boundary();
  bool interrupted() const { return parts_.status.signal != 0; }

  TrainerBase& trainer_;
  TrainerParts& parts_;
  AnyBatches& batches_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/fit.ipp>
#endif
