// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/any_optimizer.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool steps_by_elements(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) || type == typeid(RMSprop);
}

GRADACCUM_INLINE StepResult step_optimizer(AnyOptimizer& optimizer, Gradients gradients) {
  if (!optimizer.takes_gradients()) gradients.apply();
  if (gradients.raw().empty()) return StepResult::empty;
  auto* const taker = optimizer.taker;
  const bool left_to_device = taker && taker->judges_on_device(gradients);
  if (!left_to_device && gradients.overflowed()) return StepResult::skipped;
  taker ? taker->step(gradients) : optimizer.step(gradients);
  return left_to_device ? StepResult::left_to_device : StepResult::stepped;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
