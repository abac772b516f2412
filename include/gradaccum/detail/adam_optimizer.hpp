// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/adam_step.hpp>
#include <gradaccum/detail/dense.hpp>
#include <gradaccum/detail/one_pass_optimizer.hpp>

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
    std::vector<ParamState*> states;
    for (auto& group : this->param_groups())
      for (auto& parameter : group.params()) {
        const at::Tensor& gradient = gradient_of(parameter);
        if (!gradient.defined()) continue;
        states.push_back(&state_of(parameter));
        steps.push_back(step_of(parameter, gradient, *states.back(), static_cast<const Options&>(group.options())));
      }
    take(std::move(steps), multiplier);
    for (auto* state : states) state->step(state->step() + 1);
  }

  ParamState& state_of(const at::Tensor& parameter) {
    auto& state = this->state_[parameter.unsafeGetTensorImpl()];
    if (!state) state = std::make_unique<ParamState>();
    return static_cast<ParamState&>(*state);
  }

  static AdamStep step_of(const at::Tensor& parameter, const at::Tensor& gradient, ParamState& state,
                          const Options& options) {
    TORCH_CHECK(!gradient.is_sparse(), Derived::name,
                ": a gradient must be dense, got a sparse one for a parameter of ", "shape ", parameter.sizes(),
                "; use SGD, or an embedding without sparse(true)");
    state.exp_avg(settled(state.exp_avg(), parameter, "exp_avg"));
    state.exp_avg_sq(settled(state.exp_avg_sq(), parameter, "exp_avg_sq"));
    if (options.amsgrad()) state.max_exp_avg_sq(settled(state.max_exp_avg_sq(), parameter, "max_exp_avg_sq"));
    const auto [beta1, beta2] = options.betas();
    return {{options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled,
             state.step() + 1},
            parameter,
            gradient,
            state.exp_avg(),
            state.exp_avg_sq(),
            state.max_exp_avg_sq()};
  }
};

}  // namespace gradaccum::detail
