// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/planned_chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <utility>

namespace gradaccum {

namespace detail {

GRADACCUM_INLINE void check_options(const CheckpointedSequentialOptions& options, std::int64_t size) {
  TORCH_CHECK(size > 0, "CheckpointedSequential: the Sequential must have modules, got none");
  TORCH_CHECK((options.segments != 0) != (options.memory_budget != 0),
              "CheckpointedSequential: either segments or memory_budget must be given, got segments = ",
              options.segments, " and memory_budget = ", options.memory_budget);
  TORCH_CHECK(options.memory_budget >= 0, "CheckpointedSequential: memory_budget must be > 0 bytes, got ",
              options.memory_budget);
  TORCH_CHECK(options.segments >= 0 && options.segments <= size, "CheckpointedSequential: segments must be 1 to ", size,
              ", the number of modules, got ", options.segments);
}

/// Divides stages evenly into segments. The last is kept, since it would be recomputed at once.
GRADACCUM_INLINE Schedule even_segments(std::int64_t segments, std::int64_t size) {
  const auto count = std::max<std::int64_t>(segments, 1);
  Schedule schedule;
  for (std::int64_t segment = 0, stage = 0; segment < count; ++segment) {
    Schedule stages;
    for (; stage < (segment + 1) * size / count; ++stage) stages.push_back({static_cast<std::size_t>(stage), 0, {}});
    if (segment + 1 == count)
      schedule.insert(schedule.end(), stages.begin(), stages.end());
    else
      schedule.push_back({0, 0, std::move(stages)});
  }
  return schedule;
}

/// The stages of a `CheckpointedSequential`, with its schedule by segments, or with plans for its budget.
class CheckpointedChain {
 public:
  CheckpointedChain(torch::nn::Sequential stages, const CheckpointedSequentialOptions& options)
      : sequential_(std::move(stages)), options_(options) {
    const auto size = static_cast<std::int64_t>(sequential_->size());
    check_options(options, size);
    const auto modules = std::make_shared<Stages>(sequential_->begin(), sequential_->end());
    schedule_ = std::make_shared<const Schedule>(even_segments(options.segments, size));
    segments_.emplace(modules, schedule_, options.checkpoint);
    if (options.memory_budget > 0) planned_.emplace(*modules, options.memory_budget, options.checkpoint);
  }

  const torch::nn::Sequential& sequential() const { return sequential_; }
  const CheckpointedSequentialOptions& options() const { return options_; }

  void set_memory_budget(std::int64_t bytes) {
    TORCH_CHECK(options_.segments == 0, "CheckpointedSequential: it has segments, and memory_budget is another way");
    TORCH_CHECK(bytes >= 0, "CheckpointedSequential: memory_budget must be >= 0 bytes, got ", bytes);
    options_.memory_budget = bytes;
    planned_.reset();
    if (bytes > 0) planned_.emplace(Stages(sequential_->begin(), sequential_->end()), bytes, options_.checkpoint);
  }

  at::Tensor operator()(const at::Tensor& input, const at::Tensor& context) {
    TORCH_CHECK(!context.defined() || !context.requires_grad(),
                "CheckpointedSequential: the context must not require gradients, as none would reach it; got one that "
                "does: detach() it, or give it to the modules by their input");
    if (!planned_ || !at::GradMode::is_enabled()) return segments_->given(context)(input);
    // Disables autocast's cache, which would keep casts of all parameters beyond their stages, until its scope ends.
    const auto device = input.device().type();
    std::optional<Autocast> uncached;
    if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
      uncached.emplace(device, at::autocast::get_autocast_dtype(device), /*enabled=*/true, /*cache_enabled=*/false);
    return planned_->plan_for(input, context)->chain.given(context)(input);
  }

  bool has_plan() const { return !planned_ || planned_->latest(); }
  CheckpointPlan plan() const {
    if (!planned_) return {to_string(*schedule_), {}, {}, {}, 0};
    const auto latest = planned_->latest();
    TORCH_CHECK(latest,
                "CheckpointedSequential: there is no plan before the first forward pass with gradients, which "
                "measures the stages");
    return latest->plan;
  }

 private:
  torch::nn::Sequential sequential_;
  CheckpointedSequentialOptions options_;
  std::shared_ptr<const Schedule> schedule_;  // schedule by segments
  std::optional<Segment> segments_;           // stages with that schedule
  std::optional<PlannedChain> planned_;       // plans, if there is a budget
};

}  // namespace detail

GRADACCUM_INLINE CheckpointedSequentialImpl::CheckpointedSequentialImpl(torch::nn::Sequential stages,
                                                                        const CheckpointedSequentialOptions& options)
    : Module("CheckpointedSequential"),
      chain_(std::make_unique<detail::CheckpointedChain>(std::move(stages), options)) {
  for (auto& stage : chain_->sequential()->named_children()) register_module(stage.key(), stage.value());
}

GRADACCUM_INLINE CheckpointedSequentialImpl::~CheckpointedSequentialImpl() = default;

GRADACCUM_INLINE at::Tensor CheckpointedSequentialImpl::forward(const at::Tensor& input, const at::Tensor& context) {
  return (*chain_)(input, context);
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::set_memory_budget(std::int64_t bytes) {
  chain_->set_memory_budget(bytes);
}
GRADACCUM_INLINE const CheckpointedSequentialOptions& CheckpointedSequentialImpl::options() const {
  return chain_->options();
}

GRADACCUM_INLINE CheckpointPlan CheckpointedSequentialImpl::plan() const { return chain_->plan(); }

GRADACCUM_INLINE bool CheckpointedSequentialImpl::has_plan() const { return chain_->has_plan(); }

GRADACCUM_INLINE std::shared_ptr<torch::nn::Module> CheckpointedSequentialImpl::clone(
    const std::optional<at::Device>& device) const {
  auto stages = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(chain_->sequential()->clone(device));
  return std::make_shared<CheckpointedSequentialImpl>(torch::nn::Sequential(std::move(stages)), chain_->options());
}

GRADACCUM_INLINE void CheckpointedSequentialImpl::pretty_print(std::ostream& out) const {
  out << "gradaccum::CheckpointedSequential";
}

GRADACCUM_INLINE CheckpointedSequential::CheckpointedSequential(torch::nn::Sequential stages,
                                                                const CheckpointedSequentialOptions& options)
    : ModuleHolder(std::make_shared<CheckpointedSequentialImpl>(std::move(stages), options)) {}

}  // namespace gradaccum
