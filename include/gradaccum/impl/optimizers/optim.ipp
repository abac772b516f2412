// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/step_plan.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/Context.h>

#include <functional>
#include <utility>

#include <gradaccum/impl/begin.ipp>

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
  detail::StepPlan moves;
  run_steps(moves, multiplier, steps);
  for (auto& step : steps) detail::keep_state(step, kept_state(step.parameter));
}

GRADACCUM_INLINE AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions defaults)
    : OnePassOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults)
    : OnePassOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void AdamW::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::AdamStep> steps;
  for (auto& group : param_groups())
    for (auto& parameter : group.params())
      if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined())
        steps.push_back(detail::adam_step_of(name, parameter, gradient,
                                             static_cast<const AdamWOptions&>(group.options()),
                                             /*decoupled=*/true, known_state(parameter), multiplier));
  detail::StepPlan moves;
  run_steps(moves, multiplier, steps);
  for (auto& step : steps) detail::keep_state(step, kept_state(step.parameter));
}

GRADACCUM_INLINE Adam8bit::Adam8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                    Adam8bitOptions defaults)
    : Adam8bitOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE Adam8bit::Adam8bit(std::vector<at::Tensor> parameters, Adam8bitOptions defaults)
    : Adam8bitOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void Adam8bit::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_blocks(gradient_of, multiplier, /*decoupled=*/false);
}

GRADACCUM_INLINE AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                      AdamW8bitOptions defaults)
    : Adam8bitOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions defaults)
    : Adam8bitOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void AdamW8bit::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  move_blocks(gradient_of, multiplier, /*decoupled=*/true);
}

}  // namespace gradaccum::optim

namespace gradaccum::detail {

GRADACCUM_INLINE SgdStep sgd_step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                     const optim::SGDOptions& options, const torch::optim::SGDParamState* known,
                                     const Multiplier& multiplier) {
  const at::Tensor buffer = known ? known->momentum_buffer() : at::Tensor();
  SgdStep step{{options.lr(), options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(),
                /*first=*/!buffer.defined()},
               parameter,
               gradient,
               buffer};
  std::vector<FloatMoments> moments;
  if (options.momentum() != 0) moments.push_back({step.momentum_buffer, "momentum_buffer"});
  step.rows = prepare_moments(parameter, step.gradient, moments,
                              options.weight_decay() == 0 && steps_by_rows(parameter, gradient, multiplier));
  return step;
}

/// Steps the rows of a sparse gradient on a device: by index, which takes no memory and does not wait; or, if several
/// dimensions are sparse or algorithms must be deterministic, after coalescing, which waits.
GRADACCUM_INLINE std::function<void()> row_move_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                   const Multiplier& multiplier, double lr) {
  auto rows = gradient.to(state_type(parameter), /*non_blocking=*/false, /*copy=*/true);
  multiply_({rows}, multiplier);
  const bool by_number = rows.sparse_dim() == 1 && !at::globalContext().deterministicAlgorithms();
  if (!by_number) rows = rows.coalesce();
  if (const auto skipped_steps = left_out_on(parameter.device(), multiplier); skipped_steps.defined())
    rows._values().masked_fill_(skipped_steps, 0);
  rows._values().mul_(-lr);  // before rounding to the parameter's dtype
  rows = rows.to(parameter.scalar_type());
  if (by_number)
    return [parameter, numbers = rows._indices()[0], values = rows._values()] {
      parameter.index_add_(0, numbers, values);
    };
  return [parameter, rows] { parameter.add_(rows); };
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions defaults)
    : OnePassOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE SGD::SGD(std::vector<at::Tensor> parameters, SGDOptions defaults)
    : OnePassOptimizer(std::move(parameters), std::move(defaults)) {}

/// Returns false if dampening applies to a first momentum, which is undampened: the host must know if it exists.
GRADACCUM_INLINE bool SGD::judges_on_device(const Gradients& gradients) const {
  if (!OnePassOptimizer::judges_on_device(gradients)) return false;
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

GRADACCUM_INLINE void SGD::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::SgdStep> steps;
  detail::StepPlan moves;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const SGDOptions&>(group.options());
    for (auto& parameter : group.params()) {
      const at::Tensor& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      detail::check_can_be_stepped(name, parameter, gradient);
      const bool plain = options.momentum() == 0 && options.weight_decay() == 0 && !rounds(parameter);
      if (gradient.is_sparse() && plain && !parameter.is_cpu())
        moves.add(detail::row_move_of(parameter, gradient, multiplier, options.lr()));
      else
        steps.push_back(detail::sgd_step_of(parameter, gradient, options, known_state(parameter), multiplier));
    }
  }
  run_steps(moves, multiplier, steps);
  for (auto& step : steps)  // become the optimizer's once the step is taken
    if (step.settings.momentum != 0)
      kept_state(step.parameter).momentum_buffer(detail::kept_moments(step, step.momentum_buffer));
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
