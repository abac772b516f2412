// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A parameter's state in an optimizer that LibTorch lacks: a step count and named tensors, undefined if absent.
class OwnParamState : public torch::optim::OptimizerParamState {
  TORCH_ARG(std::int64_t, step) = 0;

 public:
  virtual std::vector<std::pair<std::string, at::Tensor*>> tensors() = 0;
  /// Throws if the state does not fit the parameter.
  virtual void check(const at::Tensor& parameter) const = 0;

  GRADACCUM_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void serialize(torch::serialize::InputArchive& archive) override;
};

/// Access to an optimizer's states as named tensors, for LibTorch's classes and our own.

/// Returns an empty state of the class that LibTorch's `optimizer` uses; nullptr if that class is unknown.
std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(const torch::optim::Optimizer& optimizer);

/// Makes states that are kept by rows dense until the next step, as files store them.
void make_dense(const torch::optim::Optimizer& optimizer);

/// Calls `see` with each state tensor as the optimizer keeps it.
void for_each_state_tensor(const torch::optim::Optimizer& optimizer, c10::function_ref<void(const at::Tensor&)> see);

/// Returns all states by name. The tensors are the optimizer's own, or dense copies if it keeps rows.
NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of);

/// Removes a count from `tensors` and returns it; nullopt if there is none. Throws unless it is a whole number >= 0.
std::optional<std::int64_t> taken_count(NamedTensors& tensors, const std::string& name);

/// Moves the states of all parameters from `tensors` into copies of `fresh`, and checks them. Returns a function that
/// makes them the optimizer's. Parameters without a state start afresh; if `lenient`, they keep their old state, as do
/// those whose new state does not fit.
std::function<void()> take_states(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamState& fresh,
                                  const NameOf& name_of, NamedTensors& tensors, bool lenient);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/param_states.ipp>
#endif
