// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/adafactor_step.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>
#include <gradaccum/optim/adafactor_options.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace gradaccum::optim {

/// Adafactor: steps like Adam's, with state of a row and a column for each matrix instead of two numbers an element.
///
///     ga::optim::Adafactor adafactor(model->parameters());
///     for (auto& batch : batches) {
///       adafactor.zero_grad();
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       adafactor.step();
///     }
///
/// Adaptive Learning Rates with Sublinear Memory Cost, Shazeer and Stern, 2018. With which options it is which:
///
/// - torch.optim.Adafactor: `variant(AdafactorVariant::pytorch).eps({e, 1e-3})`, where e is the dtype's machine epsilon
///   (there None): 2.2e-16 for float64, 1.2e-7 for float32, 0.0078 for bfloat16.
/// - transformers.Adafactor: the defaults; given an lr, `relative_step(false).lr(lr)`. Its clip_threshold is `d`, its
///   decay_rate `beta2_decay`.
/// - The paper: the defaults. Its momentum is `beta1`, its slow beginning `warmup_init(true)`.
///
/// Of a tensor of three dimensions or more each matrix of the last two has a state of its own. Parameters: float32,
/// float64, bfloat16 and float16 (with float32 state); of any strides. Gradients: dense. Complex parameters, one that
/// is listed twice, and state of another shape are errors, before anything has moved.
///
/// @note Does not synchronise with the device. On the CPU it uses AVX-512 or AVX2 where the processor has it, on
/// LibTorch's threads; the bits do not depend on their number. Elsewhere it is some twenty operations a tensor.
/// @note Memory: the state. During a step a column and up to 16 rows of each matrix more, and copies of what is not
/// row-major, some 16 MB of all that at a time, or one tensor's; elsewhere three temporaries of a tensor's size.
class Adafactor : public detail::OwnOptimizer<Adafactor, AdafactorOptions, AdafactorParamState> {
 public:
  static constexpr const char* name = "Adafactor";
  using OwnOptimizer::OwnOptimizer;
  using OwnOptimizer::step;

  static void check(const AdafactorOptions& options) { options.check(); }

 private:
  friend OnePassOptimizer;

  template <class GradientOf>
  void move(const GradientOf& gradient_of, const detail::Multiplier& multiplier) {
    std::vector<detail::AdafactorStep> steps;
    std::vector<std::pair<at::Tensor, AdafactorParamState>> states;  // the optimizer's once the step is taken
    for (auto& group : param_groups()) {
      check(options_of(group));  // may have been changed, or loaded
      for (auto& parameter : group.params())
        if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined()) {
          states.emplace_back(parameter, next_state(parameter, gradient, options_of(group)));
          steps.push_back(step_of(parameter, gradient, options_of(group), states.back().second));
        }
    }
    take_steps(std::move(steps), multiplier);
    keep(std::move(states));
  }

  AdafactorParamState next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                 const AdafactorOptions& options) const;
  static detail::AdafactorStep step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                       const AdafactorOptions& options, const AdafactorParamState& state);
};

inline AdafactorParamState Adafactor::next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                                 const AdafactorOptions& options) const {
  TORCH_CHECK(!parameter.is_complex(), "Adafactor: a parameter must be real, got ", parameter.scalar_type());
  detail::check_can_be_stepped_densely(name, parameter, gradient);
  auto state = state_of(parameter);
  state.check(parameter);
  state.prepare(parameter, options.beta1() != 0);
  state.step(state.step() + 1);
  return state;
}

inline detail::AdafactorStep Adafactor::step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                const AdafactorOptions& options, const AdafactorParamState& state) {
  const auto t = static_cast<double>(state.step());
  const auto [eps1, eps2] = options.eps();
  const auto most = options.warmup_init() ? 1e-6 * t : options.lr();
  return {{.lr = options.lr(),
           .step_size = options.relative_step() ? std::min(most, 1 / std::sqrt(t)) : options.lr(),
           .fresh2 = std::pow(t, options.beta2_decay()),
           .eps1 = eps1,
           .eps2 = eps2,
           .d = options.d(),
           .weight_decay = options.weight_decay(),
           .beta1 = options.beta1(),
           .scale_parameter = options.scale_parameter(),
           .pytorch = options.variant() == AdafactorVariant::pytorch},
          parameter,
          gradient,
          state.row_var(),
          state.col_var(),
          state.variance(),
          options.beta1() != 0 ? state.exp_avg() : at::Tensor()};
}

}  // namespace gradaccum::optim
