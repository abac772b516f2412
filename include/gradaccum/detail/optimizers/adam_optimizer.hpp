// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/adam_step.hpp>
#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What Adam and AdamW share: all but where the weight decay goes.
template <class Base, class Derived, class Options, class ParamState, bool decoupled>
class AdamOptimizer : public OnePassOptimizer<Base, Derived, ParamState> {
 public:
  using OnePassOptimizer<Base, Derived, ParamState>::OnePassOptimizer;
  using OnePassOptimizer<Base, Derived, ParamState>::step;

 private:
  friend OnePassOptimizer<Base, Derived, ParamState>;

  template <class GradientOf>
  void move(const GradientOf& gradient_of, const Multiplier& multiplier) {
    std::vector<AdamStep> steps;
    for (auto& group : this->param_groups())
      for (auto& parameter : group.params())
        if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined())
          steps.push_back(step_of(parameter, gradient, static_cast<const Options&>(group.options())));
    this->take_steps(steps, multiplier);
    for (auto& step : steps) keep(step);
  }

  AdamStep step_of(const at::Tensor& parameter, const at::Tensor& gradient, const Options& options) const {
    check_can_be_stepped_densely(Derived::name, parameter, gradient);
    const auto known = this->state_.find(parameter.unsafeGetTensorImpl());
    const auto state = known == this->state_.end() ? ParamState() : static_cast<const ParamState&>(*known->second);
    TORCH_CHECK(state.step() >= 0, Derived::name, ": the step count must be >= 0, got ", state.step());
    const auto [beta1, beta2] = options.betas();
    return {{options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled,
             state.step() + 1},
            parameter,
            gradient,
            settled(state.exp_avg(), parameter, "exp_avg"),
            settled(state.exp_avg_sq(), parameter, "exp_avg_sq"),
            options.amsgrad() ? settled(state.max_exp_avg_sq(), parameter, "max_exp_avg_sq") : state.max_exp_avg_sq()};
  }

  /// The state is the optimizer's once the step is taken.
  void keep(const AdamStep& step) {
    auto& kept = this->state_[step.parameter.unsafeGetTensorImpl()];
    if (!kept) kept = std::make_unique<ParamState>();
    auto& state = static_cast<ParamState&>(*kept);
    state.exp_avg(step.exp_avg);
    state.exp_avg_sq(step.exp_avg_sq);
    state.max_exp_avg_sq(step.max_exp_avg_sq);
    state.step(step.settings.step);
  }
};

}  // namespace gradaccum::detail
