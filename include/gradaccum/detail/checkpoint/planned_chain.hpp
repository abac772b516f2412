// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/chain_profile.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/measuring_scope.hpp>
#include <gradaccum/detail/checkpoint/planner.hpp>
#include <gradaccum/detail/checkpoint/random_state.hpp>
#include <gradaccum/detail/checkpoint/segment.hpp>
#include <gradaccum/detail/checkpoint/stage.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The schedule of merged stages, for people: by module of the chain.
inline Schedule by_module(const Schedule& schedule, const Stages& stages) {
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

/// Dimensions from the outermost in memory to the innermost. Operations copy what they want in another order.
inline std::vector<std::int64_t> order_in_memory(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_contiguous()) return {};
  std::vector<std::int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](auto dimension) { return tensor.stride(dimension); });
  order.push_back(tensor.is_non_overlapping_and_dense());
  return order;
}

/// What the bytes of a forward and backward pass depend on.
class PlanScope {
 public:
  PlanScope(const Stages& stages, const at::Tensor& input)
      : shape_(input.sizes()), order_(order_in_memory(input)), device_(input.device()) {
    dtypes_ = {input.scalar_type(), at::autocast::get_autocast_dtype(device_.type())};
    flags_ = {input.requires_grad(), at::autocast::is_autocast_enabled(device_.type())};
    for (auto* module : modules_of(stages)) {
      for (auto& part : module->modules()) flags_.push_back(part->is_training());
      for (auto& parameter : module->parameters()) {
        flags_.push_back(parameter.requires_grad());
        dtypes_.push_back(parameter.scalar_type());
      }
    }
  }

  /// What was planned for this does for the other: it is nowhere larger, and alike otherwise.
  bool covers(const PlanScope& other) const {
    return shape_.size() == other.shape_.size() &&
           std::equal(shape_.begin(), shape_.end(), other.shape_.begin(), std::greater_equal<>()) &&
           order_ == other.order_ && device_ == other.device_ && dtypes_ == other.dtypes_ && flags_ == other.flags_;
  }

 private:
  at::DimVector shape_;
  std::vector<std::int64_t> order_;
  at::Device device_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<bool> flags_;
};

/// Plans of a chain for a budget: one for each kind of input, made when it is first seen.
class PlannedChain {
 public:
  PlannedChain(const Stages& stages, std::int64_t budget, const CheckpointOptions& options)
      : stages_(stages), budget_(budget), options_(options) {}

  struct Planned {
    PlanScope scope;
    Segment chain;
    CheckpointPlan plan;
  };

  std::shared_ptr<const Planned> plan_for(const at::Tensor& input) {
    const std::lock_guard lock(mutex_);
    PlanScope scope(stages_, input);
    const auto known = std::ranges::find_if(plans_, [&](auto& plan) { return plan->scope.covers(scope); });
    if (known != plans_.end()) return latest_ = *known;
    latest_ = make(std::move(scope), input);
    plans_.push_back(latest_);  // behind the others: an input that has a plan keeps it, for when it runs again
    return latest_;
  }
  std::shared_ptr<const Planned> latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  /// Leaves no trace in random generators, running statistics, gradients, and what hooks around it see.
  std::shared_ptr<const Planned> make(PlanScope scope, const at::Tensor& input) const {
    const RandomScope random{RandomState()};
    const FrozenStatistics frozen(modules_of(stages_));
    const MeasuringScope measuring;
    const auto stages = std::make_shared<Stages>(merged(stages_, input));
    const auto costs = ChainProfile(*stages, options_).measure(input);
    const auto least = least_memory(costs);
    TORCH_CHECK(budget_ >= least, "CheckpointedSequential: memory_budget must be at least ", least,
                " bytes for an input that is ", TensorTraits(input), ", got ", budget_);
    const auto schedule = std::make_shared<const Schedule>(fastest_schedule(costs, budget_));
    const auto cost = [&](const Schedule& s) { return CheckpointPlan::Cost{peak_bytes(s, costs), seconds(s, costs)}; };
    return std::make_shared<Planned>(Planned{
        std::move(scope),
        Segment(stages, schedule, options_),
        {to_string(by_module(*schedule, *stages)), budget_, cost(*schedule), cost(keep_everything(costs)), least},
    });
  }

  Stages stages_;
  std::int64_t budget_;
  CheckpointOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Planned>> plans_;
  std::shared_ptr<const Planned> latest_;
};

}  // namespace gradaccum::detail
