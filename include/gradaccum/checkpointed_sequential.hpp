// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: checkpoint

#include <gradaccum/checkpoint.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

/// The schedule of a `CheckpointedSequential`, and its predicted cost. Printable.
struct CheckpointPlan {
  /// The peak bytes during forward and backward, and the seconds of both.
  struct Cost {
    std::int64_t peak_bytes = 0;
    double seconds = 0;
  };

  /// The schedule as `[0-2] 3 [[4 5] 6] 7-9*`, with stages by number. `[...]` keeps only its input, and is recomputed
  /// in backward. `*` recomputes results of cheap operations (GELU, SiLU, products) from their inputs.
  std::string schedule;

  /// The budget, if there is one. Costs are then for inputs of the planned shape, from measurements of each stage. If
  /// smaller inputs were measured, costs and `least_bytes` are upper estimates.
  std::optional<std::int64_t> memory_budget;
  Cost predicted;                ///< cost of this schedule
  Cost plain;                    ///< cost of the stages without checkpoints
  std::int64_t least_bytes = 0;  ///< least peak of any schedule
};

std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan);

/// Options for a `CheckpointedSequential`: either `segments` or `memory_budget`.
struct CheckpointedSequentialOptions {
  /// The number of segments, with equal numbers of stages where possible. All but the last are recomputed in backward.
  std::int64_t segments = 0;
  /// The maximum number of bytes; recomputes as little as that allows.
  std::int64_t memory_budget = 0;
  CheckpointOptions checkpoint = {};  ///< options for recomputing parts
};

/// See `CheckpointedSequential`.
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  CheckpointedSequentialImpl(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options);
  GRADACCUM_INLINE ~CheckpointedSequentialImpl() override;

  at::Tensor forward(const at::Tensor& input, const at::Tensor& context = {});

  /// Sets the budget from the next forward pass on; 0 keeps everything. With `or_least`, a budget that is too small is
  /// raised to the least that works. `FitMemory` calls this.
  void set_memory_budget(std::int64_t bytes, bool or_least = false);
  const CheckpointedSequentialOptions& options() const;

  /// Returns the plan of the latest forward pass. With a budget, throws before the first, which measures the stages.
  CheckpointPlan plan() const;
  bool has_plan() const;

  GRADACCUM_INLINE std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
  GRADACCUM_INLINE void pretty_print(std::ostream& out) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})  // accepts one tensor, too, in a Sequential

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A `torch::nn::Sequential` that keeps fewer activations for backward: by segments, or within a number of bytes.
///
///     torch::nn::Sequential blocks(torch::nn::Linear(4, 64), torch::nn::GELU(), torch::nn::Linear(64, 3));
///     ga::CheckpointedSequential net(blocks, {.memory_budget = 1 * ga::MiB});   // or {.segments = 2}
///     auto loss = torch::mse_loss(net->forward(x), y);
///     loss.backward();                                                 // runs again what was not kept
///     std::cout << net->plan();                                        // predicted bytes and time, and the schedule
///
/// Has the Sequential's modules under the same names, for the same saved files. Outputs, gradients and random numbers
/// are bitwise the same. Each module takes and returns one tensor, and `context` as an optional second argument, such
/// as an attention mask, which must not require gradients or change before backward. The rules of `checkpoint` apply.
///
/// Segments. `segments`, from 1 to the number of modules, is as in torch.utils.checkpoint_sequential, but more even.
///
/// Budget. `memory_budget` limits the bytes that forward and backward hold, without input, output and gradients of
/// parameters. The first forward pass measures each stage and plans the fastest schedule: stages keep their tensors,
/// recompute results of cheap operations (GELU, SiLU, products), or are recomputed. Throws if none fits.
///
/// @note If no schedule fits, the error names the least budget that works. Planning synchronizes, training does not.
/// Under autocast with a budget, parameters are cast for each stage rather than once for the forward pass, since cached
/// casts would count. Measuring takes as long as about 15 training steps, and memory for one stage's activations and
/// gradients. It is repeated for another dtype or device, `train()`/`eval()`, autocast and other frozen parameters.
/// Smaller inputs use the same plan. After four measurements, larger inputs are planned by extrapolation, unless they
/// may take twice the bytes.
/// @note Planning uses the slot of LibTorch's profiler: the first forward pass with a budget throws inside a profiler's
/// scope, or another memory observer's on this thread. Run one before. The first forward pass of the process installs
/// an autograd engine: see `SavedTensorHooks`.
class CheckpointedSequential : public torch::nn::ModuleHolder<CheckpointedSequentialImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  CheckpointedSequential(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options);
};

}  // namespace gradaccum

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/chain.ipp>
#endif
