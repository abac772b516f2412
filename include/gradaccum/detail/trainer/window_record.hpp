// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/window_totals.hpp>
#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/policy.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What a Trainer knows of its open window: its counts and losses; and which loss is NaN or infinite.
class WindowRecord {
 public:
  /// The epoch, micro-batches, samples and items so far.
  const Step& so_far() const { return step_; }
  /// The micro-batch in hand fills the window.
  bool closing() const { return closing_; }
  void set_closing(bool closing) { closing_ = closing; }

  void check_none_in_hand() const;
  /// `begins`: the first of its batch.
  void begin_micro_batch(std::int64_t samples, bool begins, FitStatus& status);
  void end_micro_batch() { in_hand_ = false; }

  /// The window is being closed, and policies hear of it, until what this gives is gone.
  auto begin_closing() {
    check_none_in_hand();
    being_closed_ = true;
    return c10::make_scope_exit([this]() noexcept { being_closed_ = false; });
  }

  /// Once a window, before anything of it moves.
  void prepare(c10::function_ref<void()> scale);

  /// False if the micro-batch of this loss is to be left out. Its number on the CPU is read at once; on a device only
  /// where that is asked for, else when the window closes.
  bool take(const Loss& loss, FitStatus& status, std::int64_t update);

  /// What this process tells others when the window closes, and takes over from all of them.
  WindowTotals totals(const FitStatus& status) const;
  void take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status);

  /// What the window was, which is over.
  Step finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr);
  /// Between two micro-batches.
  void state(Archive& archive);
  void restart();

 private:
  /// Where the micro-batch in hand is: for errors.
  struct Place {
    std::int64_t batch, epoch, update;
    std::string text() const;
  };
  /// Waits for a device only if there are losses on it that have not been read.
  void check_losses() const;
  [[noreturn]] static void stop(double loss, const Place& place);

  Step step_;
  bool in_hand_ = false, closing_ = false, prepared_ = false, being_closed_ = false;
  WeightedMean mean_;
  std::vector<std::pair<at::Tensor, Place>> to_check_;  // losses on a device
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/window_record.ipp>
#endif
