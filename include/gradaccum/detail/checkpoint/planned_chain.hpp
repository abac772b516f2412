// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace gradaccum::detail {

/// The properties on which the memory of a forward and backward pass depends.
class PlanScope {
 public:
  PlanScope(const Stages& stages, const at::Tensor& input, const at::Tensor& context);

  /// Returns whether a plan for this scope fits `other`: no dimension of `other` is larger, and all else is equal.
  bool covers(const PlanScope& other) const;

 private:
  at::DimVector shape_, context_shape_;
  std::vector<std::int64_t> order_;
  at::Device device_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<bool> flags_;
};

/// Plans of a chain for a memory budget: one for each kind of input, made when it is first seen.
class PlannedChain {
 public:
  PlannedChain(const Stages& stages, std::int64_t budget, const CheckpointOptions& options)
      : stages_(stages), budget_(budget), options_(options) {}

  struct Planned {
    PlanScope scope;
    Segment chain;
    CheckpointPlan plan;
  };

  /// `context` is a second input of all stages; it may be undefined.
  std::shared_ptr<const Planned> plan_for(const at::Tensor& input, const at::Tensor& context);
  std::shared_ptr<const Planned> latest() const;

 private:
  std::shared_ptr<const Planned> make(PlanScope scope, const at::Tensor& input, const at::Tensor& context) const;

  Stages stages_;
  std::int64_t budget_;
  CheckpointOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Planned>> plans_;
  std::shared_ptr<const Planned> latest_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/planned_chain.ipp>
#endif
