// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/module_of.hpp>

#include <torch/nn/module.h>

#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What calls a function once more, later: a copy of it; of a module, another owner, or where there is none a
/// reference.
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

/// The modules whose running statistics must not move when it is called again.
template <class Function>
std::vector<torch::nn::Module*> modules_of(Function& function) {
  if constexpr (plain_module<Function>) {
    return {const_cast<torch::nn::Module*>(static_cast<const torch::nn::Module*>(&function))};
  } else if constexpr (model<Function>) {
    auto owner = function;  // not const
    return {&module_of(owner)};
  } else if constexpr (requires {
                         { function.modules() } -> std::same_as<std::vector<torch::nn::Module*>>;
                       }) {
    return function.modules();
  } else {
    return {};
  }
}

}  // namespace gradaccum::detail
