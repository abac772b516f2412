// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/owned_tensor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
  if constexpr (requires { state.tensors(); })
    return state.tensors();
  else if constexpr (requires { state.square_avg(); })
    return {{"square_avg", &state.square_avg()},
            {"momentum_buffer", &state.momentum_buffer()},
            {"grad_avg", &state.grad_avg()}};
  else if constexpr (requires { state.sum(); })
    return {{"sum", &state.sum()}};
  else if constexpr (requires { state.momentum_buffer(); })
    return {{"momentum_buffer", &state.momentum_buffer()}};
  else
    return {{"exp_avg", &state.exp_avg()},
            {"exp_avg_sq", &state.exp_avg_sq()},
            {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

/// Not there in all settings of an optimizer.
inline bool may_be_missing(const std::string& slot) {
  return slot == "max_exp_avg_sq" || slot == "momentum_buffer" || slot == "grad_avg";
}

/// Takes a whole number >= 0 out of `tensors`; nothing if there is none.
inline std::optional<std::int64_t> take_count(NamedTensors& tensors, const std::string& name) {
  const auto node = tensors.extract(name);
  if (!node) return {};
  TORCH_CHECK(node.mapped().defined() && node.mapped().numel() == 1, "load_named_state: ", name, " must be one number");
  const auto count = node.mapped().item<double>();
  TORCH_CHECK(count >= 0 && count < 1e15 && count == std::floor(count), "load_named_state: ", name,
              " must be a whole number >= 0, got ", count);
  return static_cast<std::int64_t>(count);
}

/// Takes what belongs to `parameter` out of `tensors`, and checks it; nullptr if there is nothing.
template <class ParamState>
std::unique_ptr<ParamState> take_state(NamedTensors& tensors, const std::string& name, const at::Tensor& parameter) {
  constexpr bool checks_itself = requires(const ParamState& state) { state.check(parameter); };
  auto state = std::make_unique<ParamState>();
  bool any = false, complete = true;
  for (auto& [slot, tensor] : tensors_of(*state)) {
    auto node = tensors.extract(slot + "." + name);
    any = any || node;
    complete = complete && (node || checks_itself || may_be_missing(slot));
    if (!node) continue;
    const auto& given = node.mapped();
    TORCH_CHECK(given.defined() && given.layout() == at::kStrided &&
                    (checks_itself || given.sizes() == parameter.sizes()) &&
                    given.is_complex() == parameter.is_complex(),
                "load_named_state: ", node.key(), " must be dense, of the shape of its parameter, ", parameter.sizes(),
                ", got ",
                given.defined() ? c10::str(given.sizes(), " (", given.scalar_type(), ", ", given.layout(), ")")
                                : "an undefined tensor");
    *tensor = given.device() == parameter.device() ? owned(std::move(node.mapped())) : given.to(parameter.device());
  }
  if constexpr (requires { state->step(); }) {
    const auto step = take_count(tensors, "step." + name);
    state->step(step.value_or(0));
    any = any || step;
    complete = complete && step;
  }
  if (!any) return nullptr;
  TORCH_CHECK(complete, "load_named_state: the state of ", name, " is incomplete");
  if constexpr (checks_itself) state->check(parameter);
  return state;
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

template <class Body>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Body& body) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) body(parameter);
}

/// The state of an optimizer whose parameters have such a one. The tensors are its own.
template <class ParamState>
NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of) {
  NamedTensors all;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    const auto known = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (known == optimizer.state().end()) return;
    auto& state = static_cast<ParamState&>(*known->second);
    const auto& name = name_of(parameter);
    for (auto& [slot, tensor] : tensors_of(state))
      if (tensor->defined()) all.emplace(slot + "." + name, *tensor);
    if constexpr (requires { state.step(); })
      all.emplace("step." + name, at::scalar_tensor(static_cast<double>(state.step()), at::kDouble));
  });
  return all;
}

/// Takes the state of all parameters out of `tensors`, and checks it. Parameters of which there is nothing begin
/// afresh; if `lenient`, they stay as they are, as do those whose state does not fit. What is given back makes it the
/// optimizer's.
template <class ParamState>
std::function<void()> take_states(torch::optim::Optimizer& optimizer, const NameOf& name_of, NamedTensors& tensors,
                                  bool lenient) {
  using States = std::vector<std::pair<void*, std::unique_ptr<ParamState>>>;
  const auto loaded = std::make_shared<States>();
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    try {
      if (auto taken = take_state<ParamState>(tensors, name_of(parameter), parameter))
        loaded->emplace_back(parameter.unsafeGetTensorImpl(), std::move(taken));
    } catch (const c10::Error&) {
      if (!lenient) throw;
    }
  });
  return [&optimizer, loaded, lenient] {
    if (!lenient) optimizer.state().clear();
    for (auto& [parameter, taken] : *loaded) optimizer.state()[parameter] = std::move(taken);
  };
}

/// Options that say themselves what there is to save.
struct ArchivesItself {
  virtual ~ArchivesItself() = default;
  virtual void state(Archive& archive) = 0;
};

/// An optimizer that says itself what its state is.
struct NamesItsState {
  virtual ~NamesItsState() = default;
  virtual NamedTensors named_state(const NamedParameters& parameters) const = 0;
  /// Checks what `named_state` gave, and copies it; what comes back makes it the optimizer's.
  virtual std::function<void()> take_named_state(const NamedParameters& parameters, NamedTensors state,
                                                 bool lenient) = 0;
};

}  // namespace gradaccum::detail
