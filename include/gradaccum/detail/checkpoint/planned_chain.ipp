// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/planned_chain.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/chain_profile.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/planner.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>

namespace gradaccum::detail {

/// Translates a schedule of merged stages to modules of the chain, for display.
GRADACCUM_INLINE Schedule by_module(const Schedule& schedule, const Stages& stages) {
  std::vector<std::size_t> first{0};
  for (auto& stage : stages) first.push_back(first.back() + stage.size());
  Schedule modules;
  for (auto& item : schedule) {
    if (!item.segment.empty())
      modules.push_back({0, 0, by_module(item.segment, stages)});
    else
      for (auto module = first[item.stage]; module < first[item.stage + 1]; ++module)
        modules.push_back({module, item.way, {}});
  }
  return modules;
}

/// Dimensions from the outermost in memory to the innermost. Operations copy inputs that they need in another order.
GRADACCUM_INLINE std::vector<std::int64_t> order_in_memory(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_contiguous()) return {};
  std::vector<std::int64_t> order(static_cast<std::size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](auto dimension) { return tensor.stride(dimension); });
  order.push_back(tensor.is_non_overlapping_and_dense());
  return order;
}

GRADACCUM_INLINE PlanScope::PlanScope(const Stages& stages, const at::Tensor& input, const at::Tensor& context)
    : shape_(input.sizes()), order_(order_in_memory(input)), device_(input.device()) {
  dtypes_ = {input.scalar_type(), at::autocast::get_autocast_dtype(device_.type())};
  if (context.defined()) {
    context_shape_ = context.sizes();
    dtypes_.push_back(context.scalar_type());
  }
  flags_ = {input.requires_grad(), at::autocast::is_autocast_enabled(device_.type())};
  for (auto* module : modules_of(stages)) {
    for (auto& part : module->modules()) flags_.push_back(part->is_training());
    for (auto& parameter : module->parameters()) {
      flags_.push_back(parameter.requires_grad());
      dtypes_.push_back(parameter.scalar_type());
    }
  }
}

GRADACCUM_INLINE bool is_no_smaller(const at::DimVector& shape, const at::DimVector& other) {
  return std::ranges::equal(shape, other, std::greater_equal<>());
}

GRADACCUM_INLINE bool PlanScope::covers(const PlanScope& other) const {
  return is_no_smaller(shape_, other.shape_) && is_no_smaller(context_shape_, other.context_shape_) &&
         order_ == other.order_ && device_ == other.device_ && dtypes_ == other.dtypes_ && flags_ == other.flags_;
}

/// Makes operations save tensors as LibTorch does, for a scope. An outer checkpoint must not see tensors of a
/// measurement, since its recomputation does not repeat the measurement.
class [[nodiscard]] MeasuringScope final : SavingScope {
 public:
  MeasuringScope() : SavingScope("CheckpointedSequential") {}

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return nullptr; }
};

GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::plan_for(const at::Tensor& input,
                                                                                     const at::Tensor& context) {
  const std::lock_guard lock(mutex_);
  PlanScope scope(stages_, input, context);
  const auto known = std::ranges::find_if(plans_, [&](auto& plan) { return plan->scope.covers(scope); });
  if (known != plans_.end()) return latest_ = *known;
  latest_ = make(std::move(scope), input, context);
  plans_.push_back(latest_);  // last: an input that has a plan keeps it when it is recomputed
  return latest_;
}

GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

/// Leaves random generators, running statistics and gradients unchanged, and is invisible to outer hooks.
GRADACCUM_INLINE std::shared_ptr<const PlannedChain::Planned> PlannedChain::make(PlanScope scope,
                                                                                 const at::Tensor& input,
                                                                                 const at::Tensor& context) const {
  const RandomScope random{RandomState()};
  const FrozenStatistics frozen(modules_of(stages_));
  const MeasuringScope measuring;
  const auto stages = std::make_shared<Stages>(merged(given(stages_, context), input));
  const auto costs = costs_of(*stages, input, options_);
  const auto least = least_memory(costs);
  TORCH_CHECK_WITH(OutOfMemoryError, budget_ >= least, "CheckpointedSequential: memory_budget must be at least ", least,
                   " bytes for an input that is ", TensorTraits(input), ", got ", budget_);
  const auto schedule = std::make_shared<const Schedule>(fastest_schedule(costs, budget_));
  const auto cost = [&](const Schedule& s) { return CheckpointPlan::Cost{peak_bytes(s, costs), seconds(s, costs)}; };
  return std::make_shared<Planned>(Planned{
      std::move(scope),
      Segment(std::make_shared<Stages>(given(*stages, {})), schedule, options_),
      {to_string(by_module(*schedule, *stages)), budget_, cost(*schedule), cost(keep_everything(costs)), least},
  });
}

}  // namespace gradaccum::detail
