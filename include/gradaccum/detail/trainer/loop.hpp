// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/any_batches.hpp>
#include <gradaccum/detail/trainer/batch_divider.hpp>
#include <gradaccum/detail/trainer/counts.hpp>
#include <gradaccum/detail/trainer/data_position.hpp>
#include <gradaccum/detail/trainer/policy_list.hpp>
#include <gradaccum/detail/trainer/window_record.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/fit_report.hpp>
#include <gradaccum/metrics.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

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
  /// Tells all other processes that this one has no more batches, and what it wants, to stop say; and hears the same
  /// from them. True if another has batches: the next window is closed with its gradients.
  bool exchange_with_others() { return policies.others_continue(); }
  void stop_at_limits();
  void at_boundary();
  bool has_all_updates() const;
  bool interrupted() const { return status.signal != 0; }
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/loop.ipp>
#endif
