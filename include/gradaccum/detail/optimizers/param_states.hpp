// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

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

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// A parameter's state in an optimizer that LibTorch lacks: a step count and named tensors, undefined if absent.
class OwnParamState : public torch::optim::OptimizerParamState {
  TORCH_ARG(std::int64_t, step) = 0;

 public:
  virtual bool counts() const { return true; }  ///< true if the step count is a part of the state
  virtual std::vector<std::pair<std::string, at::Tensor*>> tensors() = 0;
  /// Throws if the state does not fit the parameter.
  virtual void check(const at::Tensor& parameter) const = 0;

  GRADACCUM_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void serialize(torch::serialize::InputArchive& archive) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

namespace gradaccum::detail {

/// Access to an optimizer's states as named tensors, for LibTorch's classes and this library's.

/// Returns an empty state of the class that LibTorch's `optimizer` uses; nullptr if that class is unknown.
std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(const torch::optim::Optimizer& optimizer);

/// Returns the state's count of steps; nullptr if its class does not count.
std::int64_t* step_count_of(torch::optim::OptimizerParamState& state);

/// Makes states that are kept by rows dense until the next step, as files store them.
void make_dense(const torch::optim::Optimizer& optimizer);

/// Calls `see` with each state tensor as the optimizer keeps it.
void for_each_state_tensor(const torch::optim::Optimizer& optimizer, c10::function_ref<void(const at::Tensor&)> see);

/// Returns all states by name. The tensors are the optimizer's own, or dense copies if it keeps rows.
NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of);

/// Removes a count from `tensors` and returns it; nullopt if there is none. Throws unless it is a whole number >= 0.
std::optional<std::int64_t> extract_count(NamedTensors& tensors, const std::string& name);

/// Moves the states of all parameters from `tensors` into copies of `fresh`, and checks them. Returns a function that
/// makes them the optimizer's. Parameters without a state that fits start afresh; if `lenient`, they keep the old one.
std::function<void()> prepare_states(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamState& fresh,
                                     const NameOf& name_of, NamedTensors& tensors, bool lenient);

/// Returns sparse moments as a dense, row-major tensor, others unchanged. Sums duplicate rows (of LibTorch's SGD).
at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero = 0);

/// Throws if the optimizer's state cannot be saved, or if one of its parameters has no name.
void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters);

/// Saves or loads the options of all groups.
void archive_groups(Archive& archive, torch::optim::Optimizer& optimizer);
/// Returns the options of all groups by name, such as group0.lr or, with the optimizer's name, AdamW.group0.lr. Leaves
/// out classes whose options cannot be saved.
Archive::Values options_of(const std::vector<optim::NamedOptimizer>& optimizers);
/// Sets options with the names that options_of() returns.
void set_options(const std::vector<optim::NamedOptimizer>& optimizers, const Archive::Values& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/param_states.ipp>
#endif
