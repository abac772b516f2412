// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/any_optimizer.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace gradaccum::detail {

GRADACCUM_INLINE bool steps_by_elements(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) || type == typeid(RMSprop);
}

GRADACCUM_INLINE bool take_step(AnyOptimizer& optimizer, Gradients gradients) {
  if (!optimizer.takes_gradients()) gradients.apply();
  if (gradients.raw().empty()) return false;
  if (!optimizer.judges_on_device(gradients) && gradients.overflowed()) return false;
  optimizer.step(gradients);
  return true;
}

}  // namespace gradaccum::detail
