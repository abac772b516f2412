// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/build/inline.hpp>

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

namespace gradaccum {

namespace detail {
class CheckpointedChain;
}

/// Either segments or a budget.
struct CheckpointedSequentialOptions {
  /// So many segments of about as many stages; all but the last run again in backward.
  std::int64_t segments = 0;
  /// So many bytes at most, with as little running again as that allows.
  std::int64_t memory_budget = 0;
  CheckpointOptions checkpoint = {};  ///< how the parts are run again
};

/// See `CheckpointedSequential`.
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  CheckpointedSequentialImpl(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options);
  GRADACCUM_INLINE ~CheckpointedSequentialImpl() override;

  at::Tensor forward(const at::Tensor& input, const at::Tensor& context = {});

  /// From the next forward pass on; 0: everything is kept. `FitMemory` does this.
  void set_memory_budget(std::int64_t bytes);
  const CheckpointedSequentialOptions& options() const;

  /// What the latest forward pass did. With a budget there is no plan before the first, which measures the stages.
  CheckpointPlan plan() const;
  bool has_plan() const;

  GRADACCUM_INLINE std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
  GRADACCUM_INLINE void pretty_print(std::ostream& out) const override;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})  // in a Sequential it takes one tensor, too

 private:
  std::unique_ptr<detail::CheckpointedChain> chain_;
};

/// A `torch::nn::Sequential` that keeps fewer activations for backward: by segments, or so that a number of bytes is
/// never exceeded.
///
///     torch::nn::Sequential blocks(torch::nn::Linear(4, 64), torch::nn::GELU(), torch::nn::Linear(64, 3));
///     ga::CheckpointedSequential net(blocks, {.memory_budget = 1 * ga::MiB});   // or {.segments = 2}
///     auto loss = torch::mse_loss(net->forward(x), y);
///     loss.backward();                                                 // runs again what was not kept
///     std::cout << net->plan();                                        // predicted bytes and time, and the schedule
///
/// It has the modules of the Sequential, under the same names; `parameters()`, `to`, `train` and saved files
/// are those of the Sequential. Each module takes a tensor and returns one. Outputs, gradients and random numbers are
/// those of the Sequential to the bit, and `checkpoint`'s rules hold; statistics of BatchNorm move once.
///
/// `context`: a tensor that every module takes beside its input, as its second argument: an attention mask, the lengths
/// of sequences. It must not require gradients, and must not change before backward.
///
/// `segments`, 1 to the number of modules: like torch.utils.checkpoint_sequential, but as even as can be.
///
/// `memory_budget`, in bytes: bounds what the module's forward and backward pass hold at any moment, beyond its input,
/// its output and gradients of parameters (those on their way included). The first forward pass with gradients measures
/// each stage by itself, forward and backward, in bytes and seconds, which takes as long as some 15 training steps; it
/// holds one stage's activations and gradients. Then the fastest schedule for it is planned: which stages keep what
/// they need, which make results of cheap operations again (GELU, SiLU, products), which run again, and in what
/// nesting. `plan()` tells what it will take. A budget that no schedule keeps throws and names the least that works.
/// Smaller inputs follow the same plan; a larger one or a larger context, another dtype or device, `train()`/`eval()`,
/// autocast, or other parameters frozen are planned for anew.
///
/// @note Planning waits for the device, training does not. Under autocast with a budget, parameters are cast again for
/// each stage instead of once for the forward pass: casts that are kept would count.
/// @note Planning sees allocations through the slot of LibTorch's profiler: inside of a profiler's scope, or of another
/// observer of memory on this thread, the first forward pass with a budget throws. Run one before.
class CheckpointedSequential : public torch::nn::ModuleHolder<CheckpointedSequentialImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  CheckpointedSequential(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/checkpointed_sequential.ipp>
#endif
