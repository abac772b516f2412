// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/chain_profile.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
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
#include <memory>
#include <mutex>
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

/// What the bytes of a forward and backward pass depend on.
class PlanScope {
 public:
  PlanScope(const Stages& stages, const at::Tensor& input)
      : shape_(input.sizes()), dtype_(input.scalar_type()), device_(input.device()), flags_{input.requires_grad()} {
    flags_.push_back(at::autocast::is_autocast_enabled(device_.type()));
    flags_.push_back(at::autocast::get_autocast_dtype(device_.type()) == at::kHalf);
    for (auto& stage : stages)
      for (auto* module : stage.modules()) {
        for (auto& part : module->modules()) flags_.push_back(part->is_training());
        for (auto& parameter : module->parameters()) flags_.push_back(parameter.requires_grad());
      }
  }

  /// What was planned for this does for the other: it is nowhere larger, and alike otherwise.
  bool covers(const PlanScope& other) const {
    return shape_.size() == other.shape_.size() &&
           std::equal(shape_.begin(), shape_.end(), other.shape_.begin(), std::greater_equal<>()) &&
           dtype_ == other.dtype_ && device_ == other.device_ && flags_ == other.flags_;
  }

 private:
  at::DimVector shape_;
  at::ScalarType dtype_;
  at::Device device_;
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
    std::erase_if(plans_, [&](auto& plan) { return latest_->scope.covers(plan->scope); });
    plans_.push_back(latest_);
    return latest_;
  }
  std::shared_ptr<const Planned> latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  /// Leaves no trace in random generators, running statistics and gradients.
  std::shared_ptr<const Planned> make(PlanScope scope, const at::Tensor& input) const {
    const RandomScope random{RandomState()};
    const FrozenStatistics frozen(modules_of(stages_));
    const auto stages = std::make_shared<Stages>(merged(stages_, input.detach().requires_grad_(input.requires_grad())));
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
