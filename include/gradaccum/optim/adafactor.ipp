// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adafactor.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/optimizers/adafactor_step.hpp>
#include <gradaccum/detail/optimizers/take_steps.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE AdafactorStep adafactor_step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                 const optim::AdafactorOptions& options,
                                                 const optim::AdafactorParamState& state) {
  const auto [eps1, eps2] = options.eps();
  const AdafactorSettings settings{.lr = options.lr(),
                                   .step_size = 0,
                                   .fresh2 = 0,
                                   .eps1 = eps1,
                                   .eps2 = eps2,
                                   .d = options.d(),
                                   .weight_decay = options.weight_decay(),
                                   .beta1 = options.beta1(),
                                   .scale_parameter = options.scale_parameter(),
                                   .pytorch = options.variant() == optim::AdafactorVariant::pytorch,
                                   .beta2_decay = options.beta2_decay(),
                                   .relative_step = options.relative_step(),
                                   .warmup_init = options.warmup_init()};
  return {at_step(settings, static_cast<double>(state.step())),
          parameter,
          gradient,
          state.row_var(),
          state.col_var(),
          state.variance(),
          options.beta1() != 0 ? state.exp_avg() : at::Tensor()};
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE Adafactor::Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                      AdafactorOptions defaults)
    : OwnOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE Adafactor::Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults)
    : OwnOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void Adafactor::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::AdafactorStep> steps;
  std::vector<std::pair<at::Tensor, AdafactorParamState>> states;  // become the optimizer's once the step is taken
  for (auto& group : param_groups()) {
    check(options_of(group));  // the options may have been changed or loaded
    for (auto& parameter : group.params())
      if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined()) {
        states.emplace_back(parameter, next_state(parameter, gradient, options_of(group)));
        steps.push_back(detail::adafactor_step_of(parameter, gradient, options_of(group), states.back().second));
      }
  }
  detail::Moves moves;
  take_steps(moves, multiplier, steps);
  keep(std::move(states));
}

GRADACCUM_INLINE AdafactorParamState Adafactor::next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                                           const AdafactorOptions& options) const {
  TORCH_CHECK(!parameter.is_complex(), "Adafactor: a parameter must be real, got ", parameter.scalar_type());
  detail::check_can_be_stepped_densely(name, parameter, gradient);
  auto state = state_of(parameter);
  state.check(parameter);
  state.prepare(parameter, options.beta1() != 0);
  state.step(state.step() + 1);
  return state;
}

}  // namespace gradaccum::optim
