// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/trainer/any_batch.hpp>
#include <gradaccum/detail/trainer/any_policy.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

namespace gradaccum::detail {

struct WindowTotals;

/// The numbers that a Trainer counts over all its fits.
struct Counts {
  std::int64_t updates = 0, epochs = 0;
};

/// The position of a `fit` in its batches, which can be saved and restored.
///
/// Batches with a `state(Archive&)` restore their position themselves. Any other range is iterated again without
/// training, with the random state of its epoch's start, up to the saved batch, which must have the same fingerprint.
/// Then the saved random state is restored.
class DataPosition {
 public:
  void hold(AnyBatches& batches) {
    *this = {};
    batches_ = &batches;
  }
  /// Restores the saved random state if an exception ended the repeated iteration.
  void let_go() {
    if (to_skip_ > 0) set_generators(after_skipping_);
    *this = {};
  }

  /// Returns `AnyBatches::most_batches`, counted from the current epoch.
  std::optional<std::int64_t> most_batches(std::int64_t epochs_ahead, bool alone) const {
    return batches_->most_batches(epochs_ahead - exhausted_, alone);
  }
  bool goes_through(const AnyBatches& batches) const { return batches_ && batches_->address() == batches.address(); }

  void begin_epoch() {
    if (!batches_have_state()) epoch_begin_ = states_of_generators();
  }
  /// Remembers the current batch, so that a state can identify it until forget().
  void see(const AnyBatch& batch) {
    taken_ += 1;
    if (!batches_have_state()) batch_ = &batch;
  }
  void forget() { batch_ = nullptr; }
  /// Notes that all batches of the epoch have been drawn.
  void exhaust() {
    TORCH_CHECK(to_skip_ == 0, "Trainer: the data has changed: the state was saved after batch ", taken_ + to_skip_,
                " of an epoch, which now has only ", taken_, "; resume with the same data, or start a new run");
    exhausted_ = true;
  }
  void end_epoch() {
    exhausted_ = false;
    taken_ = 0;
  }

  /// Returns true if the loaded state was saved in the middle of an epoch.
  bool is_in_epoch() const { return resumes_; }
  /// Returns is_in_epoch(), and resets it: the epoch continues.
  bool resumes() { return std::exchange(resumes_, false); }
  /// Returns true if all batches of the epoch have been drawn, so that only its tail is left.
  bool exhausted() const { return exhausted_; }
  /// Returns true if training used this batch before the state was saved.
  bool skips(const AnyBatch& batch);

  void state(Archive& archive);

 private:
  bool batches_have_state() const { return batches_ && batches_->has_state(); }

  AnyBatches* batches_ = nullptr;
  const AnyBatch* batch_ = nullptr;
  std::string expected_;  // the fingerprint of the last skipped batch
  Archive::Tensors epoch_begin_, after_skipping_;
  std::int64_t taken_ = 0, to_skip_ = 0;
  bool resumes_ = false, exhausted_ = false;
};

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
  void begin_micro_batch(std::int64_t samples, bool begins, FitStatus& status) {
    check_none_in_hand();
    in_hand_ = true;
    if (step_.micro_batches++ == 0) step_.epoch = status.epoch;
    step_.batches += begins;
    step_.samples += samples;
    status.samples += samples;
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
  bool add_loss(const Loss& loss, FitStatus& status, std::int64_t update);

  /// Returns the mean if it includes unread losses on a device; undefined otherwise.
  at::Tensor unread_mean() const { return to_check_.empty() ? at::Tensor() : mean_.value(); }
  /// Throws if the mean is not finite, and names the first such loss. Synchronizes with the device.
  void check_losses(const at::Tensor& mean);
  /// Throws because the gradients of the closing window are not finite, or counts its batches as left out.
  void leave_out(const std::string& parameter, FitStatus& status, std::int64_t update);
  /// True if a policy requires finite gradients, and handles an overflow itself.
  bool overflow_is_awaited = false;

  /// Returns this rank's totals when the window closes; take_totals() then replaces them by the totals of all ranks.
  WindowTotals totals(const FitStatus& status) const;
  void take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status);

  /// Returns the report of the closed window, and restarts.
  Step finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr);
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

/// A Trainer's loop over epochs, batches, micro-batches and windows, independent of the user's types.
///
/// With several ranks, all run these functions in the same order, and each function waits for all ranks: `resume`,
/// `close_window`, and the policies' on_epoch_end, at_boundary and others_continue.
class Loop {
 public:
  Loop(TrainerBase& its_trainer, std::unique_ptr<AnyOptimizer> optimizer)
      : trainer(its_trainer), window(std::move(optimizer)) {}

  FitReport fit(AnyBatches& batches, const FitOptions& options);
  /// Trains on one batch. Returns true after an update.
  bool step(const AnyBatch& batch);
  /// Trains on a batch or a part of one. `begins`: it is the first of its batch. `may_close`: it may fill the window.
  void micro_batch(const AnyBatch& batch, bool begins, bool may_close);
  /// Closes an incomplete window. Returns true after an update.
  bool flush();
  void discard();
  /// Evaluates. `on_all`: the batches are this rank's share. `until_signal`: a signal ends the evaluation, which then
  /// returns nullopt, and the fit around it.
  std::optional<Evaluation> evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all, bool until_signal = false);
  void state(Archive& archive);
  /// See `TrainerBase::planned_updates`.
  std::optional<std::int64_t> planned_updates(std::int64_t at_epoch_begin) const;

  TrainerBase& trainer;
  OpenWindow window;
  PolicyList policies;
  WindowRecord record;
  DataPosition data;
  Counts counts;
  FitStatus status;
  std::unique_ptr<BatchDivider> divider;                     // null if batches are not divided
  std::int64_t batch_size = 0;                               // samples per window; 0: not counted
  std::function<std::int64_t(std::int64_t epoch)> steps_in;  // micro-batches per window, set by Accumulate
  MetricModes metrics;                                       // metrics of evaluations inside fit
  std::vector<std::function<void()>> when_built;
  std::vector<std::string> left_out;             // buffers that are not saved in states
  std::function<void()> finish_background_save;  // waits until a thread of SaveState has written its state
  const Archive::Tensors* state_copy = nullptr;  // memory of SaveState while it saves in the background
  Archive::Values given;     // the optimizer's options and the frozen parameters before the first training
  Archive::Values kept;      // the options in use, for example of a loaded state
  bool rate_is_set = false;  // true if a policy sets the rate for each update
  bool is_built = false;

 private:
  /// Discards the window while an exception is handled, and ends the training of ranks that have gradients of it, or
  /// that wait for further windows.
  void give_up(bool others_wait);
  bool or_give_up(c10::function_ref<bool()> work);

  void resume();
  void begin_epoch(std::int64_t epoch);
  void run_epoch(AnyBatches& batches);
  bool visit(const AnyBatch& batch);
  bool train_batch(const AnyBatch& batch);
  bool train_parts(const AnyBatch& batch);
  void prepare_to_close();
  bool checks(const WindowGradients& gradients) const {
    return status.options.on_nan != OnNan::ignore && gradients.items() > 0 && !gradients.stepped();
  }
  void check_finite(WindowGradients& gradients);
  bool close_window();
  bool close_if_begun();
  void end_epoch();
  /// Throws or warns if an epoch made no update.
  void check_trained();
  std::string why_nothing_moved() const;
  void train_with_others();
  void stop_at_limits();
  void at_boundary();
  void note_given();
  void archive_given(Archive& archive);
  bool interrupted() const { return status.signal != 0; }

  double items_ = 0;                // sum over all losses of this fit
  bool warned_of_nothing_ = false;  // in this fit
};

/// Puts a model into training or evaluation mode for a scope, and restores each module's mode at its end.
///
/// A model that is already in that mode is not changed, so that submodules can stay in the other mode.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training) : ModeGuard(model) {
    if (training != was_training_) model.train(training);  // if it throws, the destructor runs anyway
  }
  ModeGuard& operator=(ModeGuard&&) = delete;
  ~ModeGuard();

 private:
  explicit ModeGuard(torch::nn::Module& model)
      : model_(model), was_training_(model.is_training()), parts_(model.modules(/*include_self=*/false)) {
    for (auto& part : parts_) modes_.push_back(part->is_training());
  }

  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

/// Records these signals while it exists, and calls the program's own handlers, too. A second SIGINT ends the program.
/// Signals that were ignored before remain ignored.
class StopSignals {
 public:
  explicit StopSignals(std::vector<int> signals);
  StopSignals& operator=(StopSignals&&) = delete;
  ~StopSignals();

  /// Returns the first received signal that any object of this class handles, or 0.
  static int came();
  /// Returns the first received one of its signals, or 0. The destructor raises a received signal again unless this
  /// function has returned it.
  int received();

 private:
  std::vector<int> signals_;
  bool asked_ = false;  // received() has returned a signal
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/trainer.ipp>
#endif
