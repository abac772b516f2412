// SPDX-License-Identifier: Apache-2.0
// Reads the properties of an optimizer of any class, and steps it.
#pragma once

#include <gradaccum/detail/window/any_optimizer.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <typeinfo>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::optional<double> learning_rate(const torch::optim::OptimizerOptions& options) try {
  return options.get_lr();
} catch (const c10::Error&) {
  return std::nullopt;
}

GRADACCUM_INLINE std::string names_of(const std::vector<optim::NamedOptimizer>& optimizers) {
  std::string names;
  for (auto& one : optimizers) names += (names.empty() ? "" : ", ") + one.name;
  return names;
}

GRADACCUM_INLINE at::Tensor loss_of(const std::function<at::Tensor()>& closure) {
  const at::AutoGradMode grad_mode(true);
  return closure ? closure() : at::Tensor();
}

GRADACCUM_INLINE bool steps_by_elements(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (const auto* const taker = dynamic_cast<const TakesGradients*>(&optimizer)) return taker->steps_by_elements();
  const auto& type = typeid(optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) || type == typeid(RMSprop);
}

GRADACCUM_INLINE bool AnyOptimizer::rates_are_0() const {
  const auto is_0 = [](auto& group) { return detail::learning_rate(group.options()) == 0.0; };
  return !members.empty() && std::ranges::all_of(param_groups(), is_0);
}

GRADACCUM_INLINE StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients) {
  if (!optimizer.takes_gradients) gradients.apply();
  if (gradients.raw().empty()) return StepResult::empty;
  auto* const taker = optimizer.taker;
  const bool left_to_device = taker && taker->judges_on_device(gradients);
  if (!left_to_device && gradients.overflowed()) return StepResult::skipped;
  if (gradients.rejected()) return StepResult::rejected;
  taker ? taker->step(gradients) : optimizer.step(gradients);
  at::autocast::clear_cache();  // its casts are of the old parameters
  return left_to_device ? StepResult::left_to_device : StepResult::stepped;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
