// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/training/any_batch.hpp>
#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/detail/training/batch_flops.hpp>
#include <gradaccum/detail/training/data_position.hpp>
#include <gradaccum/detail/training/fit_state.hpp>
#include <gradaccum/detail/training/window_record.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <torch/nn/module.h>

namespace gradaccum::detail {

/// The numbers that a Trainer counts over all its fits.
struct Counts {
  std::int64_t updates = 0, epochs = 0;
};

/// A Trainer's loop over epochs, batches, micro-batches and windows, independent of the user's types. Policies of the
/// library ask it for what TrainerBase does not offer.
///
/// With several ranks, all run these functions in the same order, and each function waits for all ranks: `resume`,
/// `close_window`, and the policies' on_epoch_end, at_boundary and others_continue.
class Loop {
 public:
  Loop(TrainerBase& trainer, std::unique_ptr<AnyOptimizer> optimizer)
      : trainer_(trainer), window_(std::move(optimizer)) {}
  static Loop& of(TrainerBase& trainer);
  const std::shared_ptr<Communicator>& peers() const { return window_.peers(); }

  // For DataParallel: with these, Replicas connects a loop as it connects an accumulator.
  void set_peers(std::shared_ptr<Communicator> peers);
  bool others_continue() { return window_.others_continue(); }
  std::vector<at::Tensor> parameters() const { return window_.optimizer().parameters(); }
  /// Returns this rank's numbers of the closing window, which the sums over all ranks then replace.
  WindowTotals totals() const { return record_.totals(fit_); }
  void take_totals(const WindowTotals& own, const WindowTotals& all) { record_.take_totals(own, all, fit_); }

  // For FitMemory.
  void divide_batches_by(std::unique_ptr<BatchDivider> divider) { divider_ = std::move(divider); }
  /// Trains on a batch or a part of one. `begins`: it is the first of its batch. `may_close`: it may fill the window.
  void micro_batch(const AnyBatch& batch, bool begins, bool may_close);
  const OpenWindow& window() const { return window_; }
  bool is_window_begun() const { return record_.so_far().micro_batches > 0; }
  /// Returns how many samples the open window still needs; nullopt if windows are not counted in samples, or if it
  /// has enough.
  std::optional<std::int64_t> missing_samples() const;
  /// A copy of what a micro-batch changes, except for the model's buffers and random numbers.
  struct WindowCopy {
    WindowRecord record;
    FitState fit;
    Archive policies = {};                      // of those with hooks inside a window
    std::optional<OpenWindow::Copy> sums = {};  // if the window has begun
  };
  WindowCopy copy_window();
  void go_back(const WindowCopy& copy);

  // For SaveState.
  bool is_save_requested() const { return fit_.saves; }
  void note_save() { fit_.wants_save = fit_.saves = false; }
  /// Sets the memory of states that are saved in the background, and how to wait for them; resets both by default.
  void set_background_save(const Archive::Tensors* memory = nullptr, std::function<void()> finish = nullptr) {
    state_copy_ = memory;
    finish_background_save_ = std::move(finish);
  }

 private:
  friend class gradaccum::TrainerBase;  // the handle of this class

  FitReport fit(AnyBatches& batches, const FitOptions& options);
  /// Trains on one batch. Returns true after an update.
  bool step(const AnyBatch& batch);
  /// Closes an incomplete window. Returns true after an update.
  bool flush();
  void discard();
  /// Evaluates. `on_all`: the batches are this rank's share. `until_signal`: a signal ends the evaluation, which then
  /// returns nullopt, and the fit around it.
  std::optional<Evaluation> evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all, bool until_signal = false);
  void validated(std::string name, Evaluation found, bool due);
  void state(Archive& archive);
  std::optional<std::int64_t> planned_updates(std::int64_t at_epoch_begin) const;
  std::int64_t updates_at_epoch_begin() const;

  /// Discards the window while an exception is handled, and ends the training of ranks that have gradients of it, or
  /// that wait for further windows.
  void give_up(bool others_wait);
  bool or_give_up(c10::function_ref<bool()> work);

  void resume();
  void begin_epoch(std::int64_t epoch);
  void run_epoch(AnyBatches& batches);
  bool visit(const AnyBatch& batch);
  bool train_batch(const AnyBatch& batch);
  bool forward_and_backward(const AnyBatch& batch, bool may_close);
  bool train_parts(const AnyBatch& batch);
  void prepare_to_close();
  bool checks(const WindowGradients& gradients) const {
    return fit_.options.on_nan != OnNan::ignore && gradients.items() > 0 && !gradients.stepped();
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
  bool interrupted() const { return fit_.signal() != 0; }
  /// Returns the number of micro-batches in a window of this epoch.
  std::int64_t steps_in(std::int64_t epoch) const;

  TrainerBase& trainer_;
  OpenWindow window_;
  PolicyList policies_;
  WindowRecord record_;
  DataPosition data_;
  Counts counts_;
  FitState fit_;
  BatchFlops flops_;
  std::unique_ptr<BatchDivider> divider_;                     // null if batches are not divided
  std::int64_t batch_size_ = 0;                               // samples per window; 0: not counted
  std::function<std::int64_t(std::int64_t epoch)> steps_in_;  // null if no policy has set it
  MetricModes metrics_;                                       // metrics of evaluations inside fit
  std::vector<std::string> left_out_;                         // buffers that are not saved in states
  const Archive::Tensors* state_copy_ = nullptr;              // memory of a state while it is saved in the background
  std::function<void()> finish_background_save_;              // waits until that state is written
  Archive::Values given_;               // the optimizer's options and the frozen parameters before the first training
  Archive::Values kept_;                // the options in use, for example of a loaded state
  std::vector<std::string> rates_set_;  // prefixes of the groups whose rate a policy sets for each update
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/loop.ipp>
#endif
