// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/training/any_batch.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/policy.hpp>

namespace gradaccum {
namespace detail {
class FittedBatches;
class MemoryFitter;
}  // namespace detail

class Accumulator;

/// Splits each batch into micro-batches that fit into memory: a policy that also works in a loop of your own.
///
///     ga::GradAccumulator optimizer(sgd);
///     ga::FitMemory::Running memory({.budget = 64 * ga::MiB});
///     for (auto& batch : batches) {                              // as large as an update is to be
///       memory.backward(optimizer, model, batch, objective);
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     std::cout << memory.plan();                                // how many rows went at once, and what they took
///
/// The update equals the unsplit batch's, up to rounding; only layers such as BatchNorm see micro-batches. The first
/// one has `min_rows`; measured memory sets the size of the next. If one runs out of memory or exceeds the budget, its
/// batch restarts with fewer rows and its first gradients, random numbers and buffers. Throws if `min_rows` exceed the
/// budget, or run out of memory (`c10::OutOfMemoryError`).
///
/// Batches. Tensors, pairs, tuples or a `std::map` of tensors, structs of `data` and `target`, and vectors of samples
/// that are not tensors; or a class with `slice(batch, from, to)` and `batch_size(batch)`.
///
/// Limits. Use one per model, not with `.in_backward`, `OptimizerInBackward` or `Shard::gradients`. The optimizer's
/// memory is not counted. A Trainer also splits the batches of `evaluate`.
///
/// @note A restart undoes no other effects of the objective. Copies the model's buffers for each batch, and the
/// gradients if a window has earlier batches. Measures by a MemoryMeter, so rows do not grow inside LibTorch's
/// profiler. The first micro-batch on a GPU runs twice, because libraries allocate workspaces in the first run. With a
/// loss scale a batch restarts if micro-batches grow to more than twice the rows of its first one, because they are
/// weighted relative to it. With `DataParallel` ranks exchange gradients when a window is complete, rather than during
/// its last backward pass. Chooses the `memory_budget` of the model's `CheckpointedSequential` parts that have one:
/// trains with everything kept and with three quarters of the budget and ever more rows, and continues with the
/// fastest; if not even `min_rows` fit, checkpoints make room.
struct FitMemory {
  static constexpr std::string_view name = "fit_memory";

  std::int64_t budget = 0;    ///< bytes of activations and gradients, by a MemoryMeter; 0: most of the free memory
  std::int64_t min_rows = 1;  ///< fewest rows of a micro-batch; BatchNorm needs 2
  std::vector<CheckpointedSequential> checkpointed = {};  ///< checkpointed parts that the model has not registered

  class Running;
};

/// A FitMemory in a Trainer, or in a loop of your own. It cannot be copied. A moved-from one must not be used.
class FitMemory::Running : public FitMemory {
 public:
  using Options = FitMemory;
  explicit Running(FitMemory given);
  Running(Running&&) noexcept = default;

  const MemoryPlan& plan() const;  ///< the rows at once so far, and their memory

  /// Runs the whole batch in place of `optimizer.backward(objective(model, batch))`, which completes the window.
  /// Returns its items and its detached mean loss, 0-dim float64.
  template <class Model, class Batch, class Objective>
  Loss backward(Accumulator& optimizer, Model& model, Batch& batch, Objective&& objective) {
    static_assert(gradaccum::model<Model>,
                  "FitMemory: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");
    return backward(optimizer, detail::module_of(model), detail::BatchOf(batch, model, objective));
  }

  void attach(TrainerBase& trainer);
  /// Requires the same limits in a resumed training, which uses the saved plan.
  void state(Archive& archive);

 private:
  friend class detail::FittedBatches;

  Loss backward(Accumulator& optimizer, torch::nn::Module& module, const detail::AnyBatch& batch);

  std::shared_ptr<detail::MemoryFitter> fitter_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/fit_memory.ipp>
#endif
