// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/planned_chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>
#include <gradaccum/detail/checkpoint/segment.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <utility>

namespace gradaccum {

/// Either segments or a budget.
struct CheckpointedSequentialOptions {
  /// So many segments of about as many stages; all but the last run again in backward.
  std::int64_t segments = 0;
  /// So many bytes at most, with as little running again as that allows.
  std::int64_t memory_budget = 0;
  CheckpointOptions checkpoint = {};
};

/// See `CheckpointedSequential`.
class CheckpointedSequentialImpl : public torch::nn::Module {
 public:
  CheckpointedSequentialImpl(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options)
      : Module("CheckpointedSequential"), options_(options), sequential_(std::move(stages)) {
    check_options();
    for (auto& stage : sequential_->named_children()) register_module(stage.key(), stage.value());
    const auto modules = std::make_shared<detail::Stages>(sequential_->begin(), sequential_->end());
    schedule_ = std::make_shared<const detail::Schedule>(even_segments());
    chain_.emplace(modules, schedule_, options.checkpoint);
    if (options.memory_budget > 0)
      planned_ = std::make_unique<detail::PlannedChain>(*modules, options.memory_budget, options.checkpoint);
  }

  at::Tensor forward(const at::Tensor& input) {
    if (!planned_ || !at::GradMode::is_enabled()) return (*chain_)(input);
    // Autocast would keep casts of all parameters until its scope ends; like this they are part of a stage.
    const auto device = input.device().type();
    std::optional<Autocast> uncached;
    if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
      uncached.emplace(device, at::autocast::get_autocast_dtype(device), /*enabled=*/true, /*cache_enabled=*/false);
    return planned_->plan_for(input)->chain(input);
  }

  /// What the latest forward pass did. With a budget there is no plan before the first, which measures the stages.
  CheckpointPlan plan() const {
    if (!planned_) return {to_string(*schedule_), {}, {}, {}, 0};
    const auto latest = planned_->latest();
    TORCH_CHECK(latest,
                "CheckpointedSequential: there is no plan before the first forward pass with gradients, which "
                "measures the stages");
    return latest->plan;
  }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    auto stages = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(sequential_->clone(device));
    return std::make_shared<CheckpointedSequentialImpl>(torch::nn::Sequential(std::move(stages)), options_);
  }
  void pretty_print(std::ostream& out) const override { out << "gradaccum::CheckpointedSequential"; }

 private:
  void check_options() const {
    const auto size = static_cast<std::int64_t>(sequential_->size());
    TORCH_CHECK(size > 0, "CheckpointedSequential: the Sequential must have modules, got none");
    TORCH_CHECK((options_.segments != 0) != (options_.memory_budget != 0),
                "CheckpointedSequential: either segments or memory_budget must be given, got segments = ",
                options_.segments, " and memory_budget = ", options_.memory_budget);
    TORCH_CHECK(options_.memory_budget >= 0, "CheckpointedSequential: memory_budget must be > 0 bytes, got ",
                options_.memory_budget);
    TORCH_CHECK(options_.segments >= 0 && options_.segments <= size, "CheckpointedSequential: segments must be 1 to ",
                size, ", the number of modules, got ", options_.segments);
  }

  /// The last one keeps what it needs: it would run again at once.
  detail::Schedule even_segments() const {
    const auto size = static_cast<std::int64_t>(sequential_->size());
    const auto count = std::max<std::int64_t>(options_.segments, 1);
    detail::Schedule schedule;
    for (std::int64_t segment = 0, stage = 0; segment < count; ++segment) {
      detail::Schedule stages;
      for (; stage < (segment + 1) * size / count; ++stage) stages.push_back({static_cast<std::size_t>(stage), 0, {}});
      if (segment + 1 == count)
        schedule.insert(schedule.end(), stages.begin(), stages.end());
      else
        schedule.push_back({0, 0, std::move(stages)});
    }
    return schedule;
  }

  CheckpointedSequentialOptions options_;
  torch::nn::Sequential sequential_;
  std::shared_ptr<const detail::Schedule> schedule_;  // by segments
  std::optional<detail::Segment> chain_;              // with that schedule
  std::unique_ptr<detail::PlannedChain> planned_;     // or by budget
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
/// It has the modules of the Sequential, under the same names; `parameters()`, `to`, `train` and checkpoints on disk
/// are those of the Sequential. Each module takes a tensor and returns one. Outputs, gradients and random numbers are
/// those of the Sequential to the bit, and `checkpoint`'s rules hold; statistics of BatchNorm move once.
///
/// `segments`, 1 to the number of modules: like torch.utils.checkpoint_sequential, but as even as can be.
///
/// `memory_budget`, in bytes: bounds what the module's forward and backward pass hold at any moment, beyond its input,
/// its output and gradients of parameters (those on their way included). The first forward pass with gradients measures
/// each stage by itself, forward and backward, in bytes and seconds, which takes as long as some 15 training steps; it
/// holds one stage's activations and gradients. Then the fastest schedule for it is planned: which stages keep what they
/// need, which make results of cheap operations again (GELU, SiLU, products), which run again, and in what nesting.
/// `plan()` tells what it will take. A budget that no schedule keeps throws and names the least that works. Smaller
/// inputs follow the same plan; a larger one, another dtype or device, `train()`/`eval()`, autocast, or other
/// parameters frozen are planned for anew.
///
/// @note Planning waits for the device, training does not. Under autocast with a budget, parameters are cast again for
/// each stage instead of once for the forward pass: casts that are kept would count.
class CheckpointedSequential : public torch::nn::ModuleHolder<CheckpointedSequentialImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  CheckpointedSequential(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options)
      : ModuleHolder(std::make_shared<CheckpointedSequentialImpl>(std::move(stages), options)) {}
};

}  // namespace gradaccum
