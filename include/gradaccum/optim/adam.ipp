// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adam.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/adam_optimizer.hpp>
#include <gradaccum/detail/optimizers/take_steps.hpp>

#include <utility>

namespace gradaccum::optim {

GRADACCUM_INLINE Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions defaults)
    : OnePassOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions defaults)
    : OnePassOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void Adam::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::AdamStep> steps;
  for (auto& group : param_groups())
    for (auto& parameter : group.params())
      if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined())
        steps.push_back(detail::adam_step_of(name, parameter, gradient,
                                             static_cast<const AdamOptions&>(group.options()),
                                             /*decoupled=*/false, known_state(parameter), multiplier));
  detail::Moves moves;
  take_steps(moves, multiplier, steps);
  for (auto& step : steps) detail::keep_state(step, kept_state(step.parameter));
}

}  // namespace gradaccum::optim
