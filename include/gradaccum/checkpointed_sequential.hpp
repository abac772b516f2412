// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
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

  /// The budget, if there is one. Costs are then for inputs of the planned shape, as measured stage by stage; where
  /// it was planned from the measurement of smaller inputs, all of them, and `least_bytes`, are upper estimates.
  std::optional<std::int64_t> memory_budget;
  Cost predicted;                ///< cost of this schedule
  Cost plain;                    ///< cost of the stages without checkpoints
  std::int64_t least_bytes = 0;  ///< no schedule needs less
};

std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan);

/// Options for a `CheckpointedSequential`: either `segments` or `memory_budget`.
struct CheckpointedSequentialOptions {
  /// The number of segments, of about as many stages each. All but the last are recomputed in backward.
  std::int64_t segments = 0;
  /// The maximum number of bytes, with as little recomputation as that allows.
  std::int64_t memory_budget = 0;
  CheckpointOptions checkpoint = {};  ///< options for recomputing parts
};

/// See `CheckpointedSequential`.
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  CheckpointedSequentialImpl(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options);
  GRADACCUM_INLINE ~CheckpointedSequentialImpl() override;

  at::Tensor forward(const at::Tensor& input, const at::Tensor& context = {});

  /// Sets the budget from the next forward pass on; 0 keeps everything. With `or_least`, takes the least that works
  /// where that is more. `FitMemory` calls this.
  void set_memory_budget(std::int64_t bytes, bool or_least = false);
  const CheckpointedSequentialOptions& options() const;

  /// The plan of the latest forward pass. With a budget, throws before the first, which measures the stages.
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
/// Has the Sequential's modules under the same names, so `parameters()`, `to`, `train` and saved files are those of the
/// Sequential, as are outputs, gradients and random numbers to the bit. Each module takes a tensor and returns one. The
/// rules of `checkpoint` hold; buffers change once. `context` is a tensor that every module takes as its second
/// argument, such as an attention mask. It must not require gradients, and must not change before backward.
///
/// `segments`, from 1 to the number of modules, is that of torch.utils.checkpoint_sequential, but as even as possible.
///
/// `memory_budget` limits the bytes that the module's forward and backward pass hold at any moment, besides its input,
/// its output and gradients of parameters, finished or not. The first forward pass with gradients measures each stage
/// alone, in bytes and seconds, which takes as long as some 15 training steps and holds one stage's activations and
/// gradients. Then the fastest schedule is planned: which stages keep what they need, which recompute results of cheap
/// operations (GELU, SiLU, products), which are recomputed, and in what nesting: `plan()`. Throws if no schedule fits
/// the budget, and names the least that works. Smaller inputs
/// follow the same plan. After four measurements, a larger input or context is planned by those: bytes grow with the
/// square of a dimension at most. One that may take twice the bytes, another dtype or device, `train()`/`eval()`,
/// autocast, or other frozen parameters are measured.
///
/// @note Planning synchronizes, training does not. Under autocast with a budget, parameters are cast for each
/// stage rather than once for the forward pass, since cached casts would count.
/// @note Planning tracks allocations through the slot of LibTorch's profiler. The first forward pass with a budget
/// throws inside a profiler's scope, or that of another memory observer on this thread: run one before.
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
