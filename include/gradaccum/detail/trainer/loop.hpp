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

/// The position of a `fit` in its batches, and the way back to a saved position.
///
/// Batches with a `state(Archive&)` restore their position themselves. Any other range is iterated again without
/// training, from the random state of its epoch's beginning up to the saved batch, which must have the same
/// fingerprint. Then the saved random state is restored.
class DataPosition {
 public:
  void hold(AnyBatches& batches) {
    *this = {};
    batches_ = &batches;
  }
  /// Never leaves the random state at the beginning of an epoch that was to be iterated again.
  void let_go() {
    if (to_skip_ > 0) set_generators(after_skipping_);
    *this = {};
  }

  /// See `AnyBatches::most_batches`; counted from the epoch that runs.
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

  /// True if the loaded state was saved in the middle of an epoch.
  bool is_in_epoch() const { return resumes_; }
  /// Returns is_in_epoch(), and resets it: the epoch continues.
  bool resumes() { return std::exchange(resumes_, false); }
  /// True if all batches of the epoch have been drawn, so that only its tail is left.
  bool exhausted() const { return exhausted_; }
  /// True if training used this batch before the state was saved.
  bool skips(const AnyBatch& batch);

  void state(Archive& archive);

 private:
  bool batches_have_state() const { return batches_ && batches_->has_state(); }

  AnyBatches* batches_ = nullptr;
  const AnyBatch* batch_ = nullptr;
  std::string expected_;  // the fingerprint of the last batch that is skipped
  Archive::Tensors epoch_begin_, after_skipping_;
  std::int64_t taken_ = 0, to_skip_ = 0;
  bool resumes_ = false, exhausted_ = false;
};

/// The counts and losses of a Trainer's open window. Finds losses that are NaN or infinite.
class WindowRecord {
 public:
  /// The epoch, micro-batches, samples and items so far.
  const Step& so_far() const { return step_; }
  /// True if the current micro-batch fills the window.
  bool closing() const { return closing_; }
  void set_closing(bool closing) { closing_ = closing; }

  void check_none_in_hand() const {
    TORCH_CHECK(!in_hand_, "Trainer: step() or flush() was called inside a micro-batch, as in the objective");
  }
  /// `begins`: the first of its batch.
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

  /// Runs `scale` once per window, before any parameter moves. `look`: reads losses that have not been read.
  void prepare(bool look, c10::function_ref<void()> scale) {
    if (std::exchange(prepared_, true)) return;
    scale();
    if (look) check_losses(unread_mean());
  }

  /// Returns false if the micro-batch with this loss is to be skipped. A loss on the CPU is read at once, one on a
  /// device only if the options require that, otherwise when the window closes.
  bool add_loss(const Loss& loss, FitStatus& status, std::int64_t update);

  /// The mean of losses on a device that nobody has read yet; undefined if there are none.
  at::Tensor unread_mean() const { return to_check_.empty() ? at::Tensor() : mean_.value(); }
  /// Throws if the mean is not finite, and says which loss is the first. Synchronizes with the device.
  void check_losses(const at::Tensor& mean);
  /// The gradients of the window that is being closed are not finite: throws, or counts what is left out.
  void leave_out(const std::string& parameter, FitStatus& status, std::int64_t update);
  /// A policy requires the gradients to be finite, and hears it if they are not.
  bool overflow_is_awaited = false;

  /// Exchanged when the window closes: this process's totals, and then the totals of all processes.
  WindowTotals totals(const FitStatus& status) const;
  void take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status);

  /// Returns the report of the closed window, and restarts.
  Step finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr);
  /// Between two micro-batches.
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
  std::int64_t left_out_ = 0;  // batches of this window, for their losses or for its gradients
  WeightedMean mean_;
  std::optional<double> read_mean_;
  std::vector<std::pair<at::Tensor, Place>> to_check_;  // losses on a device
};

/// A Trainer's loop over epochs, batches, micro-batches and windows, with everything of it that has no type of a user.
///
/// Processes that train together run these steps in the same order, each of which waits for all of them: `resume`,
/// `close_window`, and the policies' on_epoch_end, at_boundary and others_continue.
class Loop {
 public:
  Loop(TrainerBase& its_trainer, std::unique_ptr<AnyOptimizer> optimizer)
      : trainer(its_trainer), window(std::move(optimizer)) {}

  FitReport fit(AnyBatches& batches, const FitOptions& options);
  /// Trains with one batch. True if the parameters moved.
  bool step(const AnyBatch& batch);
  /// Trains with a batch or a part of one. `begins`: it is the first of its batch. `may_close`: a window may end with
  /// it.
  void micro_batch(const AnyBatch& batch, bool begins, bool may_close);
  /// Steps with the window as it is.
  bool flush();
  void discard();
  /// `on_all`: the batches are this process's share of those of all. `until_signal`: a signal ends it and the fit that
  /// it is a part of, and the numbers are thrown away.
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
  std::unique_ptr<BatchDivider> divider;                     // or none
  std::int64_t batch_size = 0;                               // samples of a window, where somebody counts them
  std::function<std::int64_t(std::int64_t epoch)> steps_in;  // micro-batches of a window, by Accumulate
  MetricModes metrics;                                       // of all that is evaluated inside of fit
  std::vector<std::function<void()>> when_built;
  std::vector<std::string> left_out;             // buffers that no state has
  std::function<void()> finish_background_save;  // waits for a state that a thread of SaveState writes
  const Archive::Tensors* state_copy = nullptr;  // of SaveState, while it saves in the background
  Archive::Values given;     // the optimizer's options and the frozen parameters when it first trained
  Archive::Values kept;      // those that count, of a loaded state say
  bool rate_is_set = false;  // by a policy, for each update anew
  bool is_built = false;

 private:
  /// Called while an exception is handled. Discards the window, and ends the training of other processes that have
  /// gradients of it, or that wait for further windows.
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
  /// Throws or warns where an epoch made no update.
  void check_trained();
  std::string why_nothing_moved() const;
  void train_with_others();
  void stop_at_limits();
  void at_boundary();
  void note_given();
  void archive_given(Archive& archive);
  bool interrupted() const { return status.signal != 0; }

  double items_ = 0;                // of all losses of this fit
  bool warned_of_nothing_ = false;  // in this fit
};

/// Puts a model into training or evaluation mode, and each of its modules back into its own at the scope's end.
///
/// A model that is in that mode already begins as it is, with all that its owner has frozen in it.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training) : ModeGuard(model) {
    if (training != was_training_) model.train(training);  // if that throws, the destructor runs all the same
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

/// Only notes these signals while it exists, and also calls a handler of the user's own. A second SIGINT ends the
/// program as ever, for people who cannot wait. A signal that was ignored stays ignored.
class StopSignals {
 public:
  explicit StopSignals(std::vector<int> signals);
  StopSignals& operator=(StopSignals&&) = delete;
  ~StopSignals();

  /// Returns the first signal that came and that any object of this class waits for, or 0.
  static int came();
  /// Returns the first of its signals that came, or 0. A signal that nobody asks for is raised again at the end.
  int received();

 private:
  std::vector<int> signals_;
  bool asked_ = false;  // for one that has come
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/trainer.ipp>
#endif
