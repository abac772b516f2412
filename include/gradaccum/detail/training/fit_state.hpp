// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/fit_options.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace gradaccum::detail {

/// The progress of a `fit`, requests, the decisions of all ranks, and causes for the report.
///
/// With several ranks a request to stop or to save takes effect when all ranks have exchanged it, as a window closes.
struct FitState : FitProgress {
  FitState() = default;
  /// `ranks`: 0 without other ranks.
  FitState(const FitOptions& of_fit, std::optional<std::int64_t> batches_of_epoch, int ranks) : together(ranks > 0) {
    ranks_ = std::max(ranks, 1);
    options = of_fit;
    batches = batches_of_epoch;
    running = true;
  }

  bool together = false;  ///< there are other ranks
  bool wants_stop = false, wants_save = false;
  int wants_signal = 0;
  bool saves = false;               ///< a state is due on all ranks
  std::string stop_reason = {};     ///< if one was given
  std::int64_t nan_batches = 0;     ///< batches left out for a non-finite loss or gradient
  std::string first_nan = {};       ///< the first of these
  std::int64_t rejected = 0;        ///< windows that a policy rejected
  std::string first_rejected = {};  ///< the first of these
  bool trained = false;             ///< this epoch had an update, or one that was skipped for an overflow
  std::int64_t windows = 0;         ///< windows in this call
  std::int64_t at_rate_0 = 0;       ///< updates in this call with all learning rates 0
  double unsent_flops = 0;          ///< of this rank, which other ranks do not know yet
  bool warned_of_nothing = false;   ///< of an epoch without an update

  /// Stops the training; with other ranks, once all have exchanged it, unless all decide `alike`.
  void stop(std::string why = {}, bool alike = false) {
    (together && !alike ? wants_stop : stopped) = true;
    if (stop_reason.empty()) stop_reason = std::move(why);
  }
  /// Stops the training if it has reached the limit in samples or time.
  void stop_at_limits();
  void interrupt(int by) { (together ? wants_signal : signal_) = by; }
  void interrupt_now(int by) { signal_ = by; }
  void add_items(double items) { items_ += items; }
  /// Adds this rank's FLOP of a micro-batch, which other ranks do not know yet.
  void add_own_flops(double flops) { flops_ += flops, unsent_flops += flops; }
  /// Adds other ranks' FLOP, and subtracts what this rank has sent.
  void take_flops(double own, double all) { flops_ += all - own, unsent_flops -= own; }
  void request_save() { (together ? wants_save : saves) = true; }
  void count_window(bool moved, bool overflowed) {
    updates += moved;
    skipped += !moved;
    ++windows;
    trained = trained || moved || overflowed;
  }
  void end_epoch();
  /// Returns the report so far, without the memory.
  FitReport report() const;
  /// Saves or loads the progress, without the options and without a reason to stop.
  void state(Archive& archive);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/fit_state.ipp>
#endif
