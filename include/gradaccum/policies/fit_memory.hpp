// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/trainer/any_batch.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policy.hpp>

namespace gradaccum {
namespace detail {
class FittedBatches;
}

class Accumulator;

/// Divides each batch into micro-batches that fit into memory, whatever that is: a policy, and a part of one's own
/// loop.
///
///     ga::GradAccumulator optimizer(sgd);
///     ga::FitMemory memory{.budget = 64 * ga::MiB};
///     for (auto& batch : batches) {                              // as large as an update is to be
///       memory.backward(optimizer, model, batch, objective);
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     std::cout << memory.plan();                                // how many rows went at once, and what they took
///
/// The update is that of the whole batch, to rounding, whatever is found; what computes over its whole batch, as
/// BatchNorm does, sees micro-batches (`verify_accumulation` tells). The first micro-batch has `min_rows`; each one
/// after it as many as those before say will fit. On a GPU the very first one is run, undone and run again, as
/// libraries allocate their workspaces in the first run. What has been found is remembered for batches whose rows are
/// alike, and begun with for smaller ones.
///
/// A micro-batch that runs out of memory, of a device, the CPU or the budget, is no error: the batch is begun again
/// with fewer rows, from the gradients, random numbers and buffers that it began with; what an objective writes to
/// elsewhere is not taken back. With a loss scale it begins again, too, where rows at once become more than twice those
/// of its first micro-batch, against which the others weigh.
///
/// Chooses the memory_budget of parts of the model that are a `CheckpointedSequential` with one, too: after a first
/// micro-batch, which keeps the least and measures the stages, everything is kept, or the parts have three quarters of
/// the budget and twice, four times … the rows go at once, whichever takes the least time a row. Each that is tried is
/// training as well. Where not even `min_rows` fit, checkpoints make room.
///
/// Batches: a Tensor, a pair, tuple or map by names of them, two tensors `data` and `target`, `ga::data`'s, a vector of
/// samples that are no tensors; or a class with a function `slice(batch, from, to)` beside it, and `batch_size(batch)`.
///
/// One for each model, of one optimizer. With `Trainer`, `Accumulate` counts batches, not their parts; `evaluate` takes
/// as many rows at once as training. Throws where `min_rows` take more than the budget, with the least that works, and
/// `c10::OutOfMemoryError` where they run out of memory twice; then nothing has changed. An optimizer's step is not
/// taken back, nor its memory counted. Not with `.in_backward` or `OptimizerInBackward`; with `DataParallel` processes
/// add up their gradients when their windows are complete, not while they run.
///
/// @note Copies the model's buffers, for each batch; and the gradients, where a window goes on from another batch. Sees
/// memory by a MemoryMeter, so inside LibTorch's profiler rows do not become more. Reads what is free of a device
/// twice.
struct FitMemory {
  static constexpr std::string_view name = "fit_memory";

  std::int64_t budget = 0;  ///< bytes of activations and gradients, as a MemoryMeter counts them; 0: all that there is
  std::int64_t min_rows = 1;                              ///< fewest rows of a micro-batch; BatchNorm needs 2
  std::vector<CheckpointedSequential> checkpointed = {};  ///< parts that are no modules of the model; see above
  struct Run;
  mutable std::shared_ptr<Run> run = {};  ///< not an option: what was found, which copies share, but for a Trainer's

  const MemoryPlan& plan() const;

  /// Backward of the whole batch, in place of `optimizer.backward(objective(model, batch))`: the window is full with
  /// it. Gives the batch's mean loss and its items, detached: 0-dim float64.
  template <class Model, class Batch, class Objective>
  Loss backward(Accumulator& optimizer, Model& model, Batch& batch, Objective&& objective) {
    static_assert(gradaccum::model<Model>,
                  "FitMemory: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");
    return backward(optimizer, detail::module_of(model), detail::BatchOf(batch, model, objective));
  }

  void attach(TrainerBase& trainer);
  /// A training that goes on has the same limits, and goes on with the plan.
  void state(Archive& archive);

 private:
  friend class detail::FittedBatches;

  Run& made_run() const;
  Loss backward(Accumulator& optimizer, torch::nn::Module& module, const detail::AnyBatch& batch);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/fit_memory.ipp>
#endif
