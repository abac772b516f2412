// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/training/fit_state.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>

namespace gradaccum::detail {

/// The counts and losses of a Trainer's open window. Detects non-finite losses.
class WindowRecord {
 public:
  /// Returns the epoch, micro-batches, samples and items so far.
  const Step& so_far() const { return step_; }
  /// Returns true if the current micro-batch fills the window.
  bool closing() const { return closing_; }
  void set_closing(bool closing) { closing_ = closing; }

  void check_none_in_hand() const {
    TORCH_CHECK(!in_hand_, "Trainer: step() or flush() was called inside a micro-batch, as in the objective");
  }
  /// Starts a micro-batch, the first of its batch if `begins`.
  void begin_micro_batch(std::int64_t samples, bool begins, FitState& fit) {
    check_none_in_hand();
    in_hand_ = true;
    if (step_.micro_batches++ == 0) step_.epoch = fit.epoch;
    step_.batches += begins;
    step_.samples += samples;
    fit.samples += samples;
  }
  void end_micro_batch() { in_hand_ = false; }

  /// Marks the window as being closed until the returned guard is destroyed.
  auto begin_closing() {
    check_none_in_hand();
    being_closed_ = true;
    return c10::make_scope_exit([this]() noexcept { being_closed_ = false; });
  }

  /// Runs `scale` once per window, before any update. With `look`, checks losses that have not been read.
  void prepare(bool look, c10::function_ref<void()> scale) {
    if (std::exchange(prepared_, true)) return;
    scale();
    if (look) check_losses(unread_mean());
  }

  /// Returns false if the micro-batch with this loss must be skipped. A loss on the CPU is read immediately, one on a
  /// device only if the options require it, otherwise when the window closes.
  bool add_loss(const Loss& loss, FitState& fit, std::int64_t update);

  /// Returns the mean if it includes unread losses on a device; undefined otherwise.
  at::Tensor unread_mean() const { return to_check_.empty() ? at::Tensor() : mean_.value(); }
  /// Throws if the mean is not finite, and names the first such loss. Synchronizes with the device.
  void check_losses(const at::Tensor& mean);
  /// Throws because the gradients of the closing window are not finite, or counts its batches as left out.
  void leave_out(const std::string& parameter, FitState& fit, std::int64_t update);
  /// Counts the closing window, which a policy has rejected.
  void count_rejected(const std::string& why, FitState& fit, std::int64_t update) const;
  /// True if a policy requires finite gradients, and handles an overflow itself.
  bool overflow_is_awaited = false;

  /// Returns this rank's totals when the window closes; take_totals() then replaces them by the totals of all ranks.
  WindowTotals totals(const FitState& fit) const;
  void take_totals(const WindowTotals& own, const WindowTotals& all, FitState& fit);

  /// Returns the report of the closed window, and restarts.
  Step finish(const Gradients& gradients, StepResult result, std::int64_t updates, double lr);
  /// Saves or loads the record, between two micro-batches.
  void state(Archive& archive);
  void restart() {
    step_ = {};
    mean_ = {};
    to_check_.clear();
    read_mean_.reset();
    in_hand_ = closing_ = prepared_ = overflow_is_awaited = false;
    left_out_ = 0;
  }

 private:
  /// The position of the current micro-batch, for errors.
  struct Place {
    std::int64_t batch, epoch, update;
    std::string text() const {
      return plain_text("batch ", batch, " of epoch ", epoch, " (both counted from 0), in update ", update);
    }
  };
  std::string place_of_window(const FitState& fit, std::int64_t update) const;
  [[noreturn]] static void stop(double loss, const Place& place) {
    TORCH_CHECK(false, "Trainer: the loss must be finite, got ", loss, " for ", place.text(),
                "; check that batch and the learning rate, or skip such batches: {.on_nan = ga::OnNan::skip}");
  }

  Step step_;
  bool in_hand_ = false, closing_ = false, prepared_ = false, being_closed_ = false;
  std::int64_t left_out_ = 0;  // batches of this window that were left out
  WeightedMean mean_;
  std::optional<double> read_mean_;
  std::vector<std::pair<at::Tensor, Place>> to_check_;  // losses on a device
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/window_record.ipp>
#endif
