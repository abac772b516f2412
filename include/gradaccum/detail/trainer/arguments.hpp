// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum::detail {

/// What a Trainer holds of a model: a plain module by reference, a `ModuleHolder` or another pointer by value.
template <class M>
using kept_model_t = std::conditional_t<plain_module<M>, M, std::remove_cvref_t<M>>;

template <class O>
concept is_optimizer = std::derived_from<O, torch::optim::Optimizer> || optimizer<O>;

template <class O>
auto& pointee_of(O& optimizer) {
  if constexpr (is_optimizer<std::remove_cvref_t<O>>)
    return optimizer;
  else
    return *optimizer;
}

/// The optimizer that was given, or that is behind the pointer that was given.
template <class O>
using optimizer_t = std::remove_cvref_t<decltype(pointee_of(std::declval<std::remove_reference_t<O>&>()))>;

/// It, checked for what its type does not tell.
template <class O>
auto& checked_optimizer(O& given) {
  if constexpr (!is_optimizer<std::remove_cvref_t<O>> && requires { given == nullptr; })
    TORCH_CHECK(!(given == nullptr), "Trainer: the pointer to the optimizer must not be null; was it moved from?");
  auto& optimizer = pointee_of(given);
  if constexpr (std::derived_from<std::remove_cvref_t<decltype(optimizer)>, torch::optim::Optimizer>)
    check_can_be_wrapped(optimizer, "Trainer",
                         "ga::Accumulate{.steps = n} says how many micro-batches an update takes");
  return optimizer;
}

/// What a Trainer can be made of.
template <class Model, class Optimizer>
constexpr bool are_trainer_arguments() {
  static_assert(model<Model>, "Trainer: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");
  static_assert(!plain_module<Model> || std::is_lvalue_reference_v<Model>,
                "Trainer: holds a plain module by reference; give it a name first, or use a ModuleHolder");
  static_assert(!std::is_const_v<std::remove_reference_t<Model>>, "Trainer: a module that is const cannot be trained");
  static_assert(!accumulating<Optimizer>, "Trainer: give it the optimizer itself, and ga::Accumulate{.steps = N}");
  static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                "Trainer: LBFGS calls its closure several times a step, so it has no micro-batches; use SGD, Adam, "
                "AdamW, RMSprop, Adagrad or one of your own");
  return true;
}

/// Keeps an owning pointer alive, where it was given for good or can be shared.
template <class O>
std::shared_ptr<void> kept_owner(O&& given) {
  using Pointer = std::remove_cvref_t<O>;
  static_assert(std::is_lvalue_reference_v<O> || !is_optimizer<Pointer>,
                "Trainer: holds the optimizer by reference; give it a name first, or a pointer to it");
  static_assert(
      std::is_lvalue_reference_v<O> || is_optimizer<Pointer> || requires { given == nullptr; },
      "Trainer: takes over a pointer to an optimizer, but nothing else that holds one");
  if constexpr (!is_optimizer<Pointer> && std::constructible_from<Pointer, O>)
    return std::make_shared<Pointer>(std::forward<O>(given));
  return nullptr;
}

/// The learning rate of the first group; NaN where the optimizer does not tell.
template <class O>
double learning_rate_of(O& optimizer) try {
  if constexpr (requires { optimizer.param_groups().front().options().get_lr(); })
    if (!optimizer.param_groups().empty()) return optimizer.param_groups().front().options().get_lr();
  return std::numeric_limits<double>::quiet_NaN();
} catch (const c10::Error&) {  // LibTorch's base class throws for options of the user's own
  return std::numeric_limits<double>::quiet_NaN();
}

/// Where the first parameter lies.
template <class O>
at::Device device_of(O& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params())
      if (parameter.defined()) return parameter.device();
  return at::kCPU;
}

}  // namespace gradaccum::detail
