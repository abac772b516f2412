// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/any_optimizer.hpp>

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool take_step(AnyOptimizer& optimizer, Gradients gradients) {
  if (!optimizer.takes_gradients()) gradients.apply();
  if (gradients.raw().empty()) return false;
  if (!optimizer.judges_on_device(gradients) && gradients.overflowed()) return false;
  optimizer.step(gradients);
  return true;
}

}  // namespace gradaccum::detail
