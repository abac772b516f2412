// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/inputs.hpp>
#include <gradaccum/detail/types/module_of.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

template <class Function>
concept not_options = !std::same_as<std::remove_cvref_t<Function>, CheckpointOptions>;

/// Returns a callable for the recomputation: a copy of a function, an owner of a module, or a reference to a module
/// that has no owner.
template <class Function>
auto callable(Function& function) {
  if constexpr (plain_module<Function>) {
    return [&function](auto&&... inputs) { return function.forward(std::forward<decltype(inputs)>(inputs)...); };
  } else if constexpr (model<Function>) {
    return [owner = function](auto&&... inputs) mutable {
      return (*owner).forward(std::forward<decltype(inputs)>(inputs)...);
    };
  } else {
    static_assert(std::is_copy_constructible_v<std::decay_t<Function>>,
                  "checkpoint: the function must be copyable, since it is called again later; let it hold a shared_ptr "
                  "instead of a unique_ptr");
    return std::decay_t<Function>(function);
  }
}

/// The modules whose running statistics must not change when the function is recomputed.
template <class Function>
std::vector<torch::nn::Module*> modules_of(Function& function) {
  if constexpr (plain_module<Function>) {
    return {const_cast<torch::nn::Module*>(static_cast<const torch::nn::Module*>(&function))};
  } else if constexpr (model<Function>) {
    auto owner = function;  // a copy that is not const
    return {&module_of(owner)};
  } else if constexpr (requires {
                         { function.modules() } -> std::same_as<std::vector<torch::nn::Module*>>;
                       }) {
    return function.modules();
  } else {
    return {};
  }
}

/// Runs a part's forward pass with a frame in place of the tensors that its operations save. `inputs` are those of the
/// part. `again` reruns it, which leaves the running statistics of `modules` unchanged.
void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules, KeptTensors& inputs,
                  std::function<void()> again, c10::function_ref<void()> forward);

/// Calls `function(inputs...)` in a frame; without one if gradients are disabled.
template <class Function, class... Inputs>
auto run_checkpointed(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  static_assert(
      !plain_module<Function> || std::is_lvalue_reference_v<Function>,
      "checkpoint: a module without an owner must outlive backward, and this one is temporary; use a holder or a "
      "shared_ptr");
  auto call = callable(function);
  if (!at::GradMode::is_enabled()) return call(std::forward<Inputs>(inputs)...);

  const auto kept = std::make_shared<CheckpointInputs<Inputs...>>(inputs...);
  const auto again = [kept, call] {
    auto as_it_was = call;  // a copy, since a call may change the function's state
    kept->call(as_it_was);
  };
  const auto run = [&](c10::function_ref<void()> forward) {
    run_in_frame(options, modules_of(function), kept->tensors(), again, forward);
  };
  using Outputs = std::decay_t<decltype(call(std::forward<Inputs>(inputs)...))>;
  if constexpr (std::is_void_v<Outputs>) {
    run([&] { call(std::forward<Inputs>(inputs)...); });
  } else {
    std::optional<Outputs> outputs;
    run([&] { outputs.emplace(call(std::forward<Inputs>(inputs)...)); });
    return std::move(*outputs);
  }
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/run_checkpointed.ipp>
#endif
