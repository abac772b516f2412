// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/parallel/window_totals.hpp>
#include <gradaccum/detail/trainer/any_policy.hpp>
#include <gradaccum/detail/trainer/arguments.hpp>
#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The numbers that a Trainer counts over all its fits.
struct Counts {
  std::int64_t updates = 0, epochs = 0;

  void state(Archive& archive);
};

/// The position of a `fit` in its batches, and the way back to a saved position.
///
/// Batches with a `state(Archive&)` restore their position themselves. Any other range is iterated again without
/// training, from the random state of its epoch's beginning up to the saved batch, which must have the same
/// fingerprint. Then the saved random state is restored.
class DataPosition {
 public:
  void hold(AnyBatches& batches);
  /// Never leaves the random state at the beginning of an epoch that was to be iterated again.
  void let_go();

  bool goes_through(const AnyBatches& batches) const { return batches_ && batches_->address() == batches.address(); }

  void begin_epoch();
  /// Remembers the current batch, so that a state can identify it until forget().
  void see(const AnyBatch& batch);
  void forget() { batch_ = nullptr; }
  /// Notes that all batches of the epoch have been drawn.
  void exhaust();
  void end_epoch();

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

/// Holds the batches of a fit while it runs.
class DataScope {
 public:
  DataScope(DataPosition& position, AnyBatches& batches) : position_(position) { position.hold(batches); }
  DataScope(const DataScope&) = delete;
  DataScope& operator=(const DataScope&) = delete;
  ~DataScope() { position_.let_go(); }

 private:
  DataPosition& position_;
};

/// Saves or loads the position in a fit, which only another fit continues.
void archive_fit(Archive& archive, FitStatus& status, DataPosition& data);

/// Returns the epoch that a fit was saved in the middle of.
std::optional<std::int64_t> epoch_in_hand(const Archive& archive);

/// The counts and losses of a Trainer's open window. Finds losses that are NaN or infinite.
class WindowRecord {
 public:
  /// The epoch, micro-batches, samples and items so far.
  const Step& so_far() const { return step_; }
  /// True if the current micro-batch fills the window.
  bool closing() const { return closing_; }
  void set_closing(bool closing) { closing_ = closing; }

  void check_none_in_hand() const;
  /// `begins`: the first of its batch.
  void begin_micro_batch(std::int64_t samples, bool begins, FitStatus& status);
  void end_micro_batch() { in_hand_ = false; }

  /// Marks the window as being closed until the returned guard is destroyed.
  auto begin_closing() {
    check_none_in_hand();
    being_closed_ = true;
    return c10::make_scope_exit([this]() noexcept { being_closed_ = false; });
  }

  /// Runs `scale` once per window, before any parameter moves.
  void prepare(c10::function_ref<void()> scale);

  /// Returns false if the micro-batch with this loss is to be skipped. A loss on the CPU is read at once, one on a
  /// device only if the options require that, otherwise when the window closes.
  bool take(const Loss& loss, FitStatus& status, std::int64_t update);

  /// Exchanged when the window closes: this process's totals, and then the totals of all processes.
  WindowTotals totals(const FitStatus& status) const;
  void take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status);

  /// Returns the report of the closed window, and restarts.
  Step finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr);
  /// Between two micro-batches.
  void state(Archive& archive);
  void restart();

 private:
  /// The position of the current micro-batch, for errors.
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

namespace gradaccum {
class TrainerBase;
}

namespace gradaccum::detail {

/// A Trainer's loop over epochs, batches, micro-batches and windows, with everything of it that has no type of a user.
///
/// Processes that train together run these steps in the same order, each of which waits for all of them: `resume`,
/// `close_window`, `exchange_with_others`, and the policies' on_epoch_end, at_boundary and others_continue.
class Loop {
 public:
  Loop(TrainerBase& trainer, std::unique_ptr<AnyOptimizer> optimizer);

  FitReport fit(AnyBatches& batches, const FitOptions& options);
  /// Trains with one batch. True if the parameters moved.
  bool step(const AnyBatch& batch);
  /// Steps with the window as it is.
  bool flush();
  void discard();
  /// `on_all`: the batches are this process's share of those of all.
  Evaluation evaluate(AnyBatches& batches, Evaluator evaluator, bool on_all);
  void state(Archive& archive);

  TrainerBase& trainer;
  OpenWindow window;
  PolicyList policies;
  WindowRecord record;
  DataPosition data;
  Counts counts;
  FitStatus status;
  std::unique_ptr<BatchDivider> divider;  // or none
  std::int64_t batch_size = 0;            // samples of a window, where somebody counts them
  std::vector<std::string> metrics;       // names of all that is evaluated inside of fit: validation/loss
  std::vector<std::function<void()>> when_built;
  bool is_built = false;

 private:
  /// Runs a piece of training. An exception discards the window, and ends the training of other processes that have
  /// gradients of it, or that wait for further windows.
  template <class Work>
  auto guarded(Work work, const bool& others_wait = false);
  void give_up(std::exception& error, bool others_wait);

  void resume();
  void begin_epoch(std::int64_t epoch);
  void run_epoch(AnyBatches& batches);
  bool train_batch(const AnyBatch& batch);
  bool train_parts(const AnyBatch& batch);
  /// `begins`: the first of its batch. `may_close`: a window may end with it.
  void micro_batch(const AnyBatch& batch, bool begins, bool may_close);
  void prepare_to_close();
  bool close_window();
  bool close_if_begun();
  void end_epoch();
  void train_with_others();
  /// Exchanges with all processes that this one has no more batches, and requests such as to stop. Returns true if
  /// another process has batches, whose gradients close the next window.
  bool exchange_with_others() { return policies.others_continue(); }
  void stop_at_limits();
  void at_boundary();
  bool has_all_updates() const;
  bool interrupted() const { return status.signal != 0; }
};

/// Puts a model into training or evaluation mode, and each of its modules back into its own at the scope's end.
///
/// A model that is in that mode already begins as it is, with all that its owner has frozen in it.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training);
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;
  ~ModeGuard();

 private:
  explicit ModeGuard(torch::nn::Module& model);

  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

/// Sets up a `fit`: training mode, gradients enabled, and the memory meter for its report.
class FitScope {
 public:
  FitScope(torch::nn::Module& model, c10::Device device, FitStatus& status, const FitStatus& begin);
  FitScope(const FitScope&) = delete;
  FitScope& operator=(const FitScope&) = delete;
  ~FitScope();

  FitReport report() const;

 private:
  ModeGuard mode_;
  at::AutoGradMode grad_mode_{true};
  c10::Device device_;
  FitStatus& status_;
  std::optional<MemoryMeter> meter_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/trainer.ipp>
#endif
