// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/sgd.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/sgd_step.hpp>
#include <gradaccum/detail/optimizers/take_steps.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>

#include <functional>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE SgdStep sgd_step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                     const optim::SGDOptions& options, const torch::optim::SGDParamState* known) {
  const at::Tensor buffer = known ? known->momentum_buffer() : at::Tensor();
  return {{options.lr(), options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(),
           /*first=*/!buffer.defined()},
          parameter,
          gradient,
          options.momentum() != 0 ? settled(buffer, parameter, "momentum_buffer") : buffer};
}

GRADACCUM_INLINE void move_rows(const at::Tensor& parameter, const at::Tensor& gradient, const Multiplier& multiplier,
                                double lr) {
  const auto scaled = gradient.to(state_type(parameter), /*non_blocking=*/false, /*copy=*/true);
  multiply_({scaled}, multiplier);
  parameter.add_(scaled.to(parameter.scalar_type()), -lr);
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions defaults)
    : OnePassOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE SGD::SGD(std::vector<at::Tensor> parameters, SGDOptions defaults)
    : OnePassOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void SGD::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::SgdStep> steps;
  std::vector<std::function<void()>> sparse;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    for (auto& parameter : group.params()) {
      const at::Tensor& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      detail::check_can_be_stepped(name, parameter, gradient);
      const bool plain = options.momentum() == 0 && options.weight_decay() == 0 && !rounds(parameter);
      if (gradient.is_sparse() && plain)
        sparse.push_back(
            [=, &multiplier, lr = options.lr()] { detail::move_rows(parameter, gradient, multiplier, lr); });
      else
        steps.push_back(detail::sgd_step_of(parameter, gradient.is_sparse() ? gradient.to_dense() : gradient, options,
                                            known_state(parameter)));
    }
  }
  take_steps(steps, multiplier);
  for (auto& move : sparse) move();
  for (auto& step : steps)  // the optimizer's once the step is taken
    if (step.settings.momentum != 0) kept_state(step.parameter).momentum_buffer(step.momentum_buffer);
}

}  // namespace gradaccum::optim
