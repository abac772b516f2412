// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/ordered_dict.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// An optimizer's state as tensors with names: `exp_avg.0.weight`. LibTorch's own files know parameters by their
/// position only.

using NamedTensors = std::map<std::string, at::Tensor>;
using NamedParameters = torch::OrderedDict<std::string, at::Tensor>;  // what Module::named_parameters gives

/// The tensors that a parameter's state is made of.
template <class ParamState>
std::vector<std::pair<std::string, at::Tensor*>> tensors_of(ParamState& state) {
  if constexpr (requires { state.momentum_buffer(); })
    return {{"momentum_buffer", &state.momentum_buffer()}};
  else
    return {{"exp_avg", &state.exp_avg()},
            {"exp_avg_sq", &state.exp_avg_sq()},
            {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

/// Takes what belongs to `parameter` out of `tensors`, and checks it; nullptr if there is nothing.
template <class ParamState>
std::unique_ptr<ParamState> take_state(NamedTensors& tensors, const std::string& name, const at::Tensor& parameter) {
  auto state = std::make_unique<ParamState>();
  std::size_t found = 0, needed = 0;
  for (auto& [slot, tensor] : tensors_of(*state)) {
    const auto node = tensors.extract(slot + "." + name);
    needed += slot != "max_exp_avg_sq";
    if (!node) continue;
    found += slot != "max_exp_avg_sq";
    const auto& given = node.mapped();
    TORCH_CHECK(given.defined() && given.layout() == at::kStrided && given.sizes() == parameter.sizes() &&
                    given.is_complex() == parameter.is_complex(),
                "load_named_state: ", node.key(), " must be dense, of the shape of its parameter, ", parameter.sizes(),
                ", got ",
                given.defined() ? c10::str(given.sizes(), " (", given.scalar_type(), ", ", given.layout(), ")")
                                : "an undefined tensor");
    *tensor = given.detach().to(parameter.device(), given.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  if constexpr (requires { state->step(); }) {
    ++needed;
    if (const auto node = tensors.extract("step." + name)) {
      ++found;
      TORCH_CHECK(node.mapped().defined() && node.mapped().numel() == 1, "load_named_state: ", node.key(),
                  " must be one number");
      const auto step = node.mapped().template item<double>();
      TORCH_CHECK(step >= 0 && step < 1e15 && step == std::floor(step), "load_named_state: ", node.key(),
                  " must be a whole number >= 0, got ", step);
      state->step(static_cast<std::int64_t>(step));
    }
  }
  TORCH_CHECK(found == 0 || found == needed, "load_named_state: the state of ", name, " is incomplete");
  return found == 0 ? nullptr : std::move(state);
}

/// Finds a parameter's name.
class NameOf {
 public:
  explicit NameOf(const NamedParameters& parameters) {
    for (auto& item : parameters) names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  const std::string& operator()(const at::Tensor& parameter) const {
    const auto found = names_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != names_.end(), "optimizer state: a parameter of shape ", parameter.sizes(),
                " has no name; pass the named_parameters() of the model that the optimizer steps");
    return found->second;
  }

 private:
  std::unordered_map<const void*, std::string> names_;
};

}  // namespace gradaccum::detail
