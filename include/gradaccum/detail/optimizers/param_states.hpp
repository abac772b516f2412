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

/// State of a parameter, of an optimizer that LibTorch does not have: a step count, and tensors by name; one that is
/// undefined is not there.
class OwnParamState : public torch::optim::OptimizerParamState {
  TORCH_ARG(std::int64_t, step) = 0;

 public:
  virtual std::vector<std::pair<std::string, at::Tensor*>> tensors() = 0;
  /// Throws where this is not the state of such a parameter.
  virtual void check(const at::Tensor& parameter) const = 0;

  GRADACCUM_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void serialize(torch::serialize::InputArchive& archive) override;
};

/// The states of an optimizer's parameters as tensors with names, whichever class of LibTorch's or ours they are of.

/// One that knows nothing yet, of the class that LibTorch's `optimizer` keeps; nullptr if nobody knows it.
std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(const torch::optim::Optimizer& optimizer);

/// Those that are kept by rows become dense, as files have them, until the next step.
void make_dense(const torch::optim::Optimizer& optimizer);

/// All their tensors, as the optimizer keeps them.
void for_each_state_tensor(const torch::optim::Optimizer& optimizer, c10::function_ref<void(const at::Tensor&)> see);

/// All of them. The tensors are the optimizer's own, or dense copies where it keeps rows.
NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of);

/// Takes a whole number >= 0 out of `tensors`; nothing if there is none.
std::optional<std::int64_t> taken_count(NamedTensors& tensors, const std::string& name);

/// Takes the states of all parameters, each at first as `fresh`, out of `tensors`, and checks them. Parameters of which
/// there is nothing begin afresh; if `lenient`, they stay as they are, as do those whose state does not fit. What is
/// given back makes them the optimizer's.
std::function<void()> take_states(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamState& fresh,
                                  const NameOf& name_of, NamedTensors& tensors, bool lenient);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/param_states.ipp>
#endif
