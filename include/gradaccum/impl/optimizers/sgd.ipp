// SPDX-License-Identifier: Apache-2.0
// SGD: who judges the gradients.
#pragma once

#include <gradaccum/optim/sgd.hpp>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

GRADACCUM_INLINE bool SGD::judges_on_device(const Gradients& gradients) const {
  if (!ElementOptimizer::judges_on_device(gradients)) return false;
  const detail::GradientOf gradient_of(gradients);
  bool first_is_other = false;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    if (options.momentum() == 0 || options.dampening() == 0) continue;
    for (auto& parameter : group.params()) {
      const auto* const known = known_state(parameter);
      first_is_other |= gradient_of(parameter).defined() && !(known && known->momentum_buffer().defined());
    }
  }
  return !first_is_other;
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
