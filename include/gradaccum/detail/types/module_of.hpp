// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/nn/module.h>

#include <concepts>
#include <type_traits>

namespace gradaccum::detail {

template <class M>
concept plain_module = std::derived_from<std::remove_cvref_t<M>, torch::nn::Module>;

/// A `ModuleHolder`, a `shared_ptr` to a module, or any other pointer to one.
template <class M>
concept points_to_module = !plain_module<M> && requires(M & model) {
  { *model } -> plain_module;
};

template <class M>
concept model = plain_module<M> || points_to_module<M>;

void check_points_to_a_module(bool it_does);

/// Returns the module that `model` is or points to.
template <model Model>
torch::nn::Module& module_of(Model& model) {
  if constexpr (plain_module<Model>) {
    return model;
  } else {
    if constexpr (requires { model == nullptr; }) check_points_to_a_module(!(model == nullptr));
    return *model;
  }
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/types/module_of.ipp>
#endif
