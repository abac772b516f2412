// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/adam_step.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace gradaccum::detail {

/// The code that Adam and AdamW share. They differ in their options and states, and in applying the weight decay.

template <class Options>
AdamSettings settings_of(const Options& options, bool decoupled, std::int64_t step) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled, step};
}

/// Prepares a step after checking its tensors. `known` is the parameter's state, nullptr before its first step.
template <class Options, class ParamState>
AdamStep adam_step_of(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient,
                      const Options& options, bool decoupled, const ParamState* known, const Multiplier& multiplier) {
  check_can_be_stepped(optimizer, parameter, gradient);
  const ParamState none;
  const ParamState& state = known ? *known : none;
  TORCH_CHECK(state.step() >= 0, optimizer, ": the step count must be >= 0, got ", state.step());
  const auto settings = settings_of(options, decoupled, state.step() + 1);
  return adam_step_of(settings, parameter, gradient, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(),
                      multiplier);
}

template <class ParamState>
void keep_state(const AdamStep& step, ParamState& state) {
  state.exp_avg(kept_moments(step, step.exp_avg));
  state.exp_avg_sq(kept_moments(step, step.exp_avg_sq));
  state.max_exp_avg_sq(step.settings.amsgrad ? kept_moments(step, step.max_exp_avg_sq) : step.max_exp_avg_sq);
  state.step(step.settings.step);
}

}  // namespace gradaccum::detail
