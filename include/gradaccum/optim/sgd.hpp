// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>
#include <gradaccum/detail/optimizers/sgd_step.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::optim {

using SGDOptions = torch::optim::SGDOptions;

/// torch::optim::SGD in one pass over memory, which takes a window's deferred factor on the way.
///
///     ga::optim::SGD sgd(model->parameters(), ga::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
///     torch::mse_loss(model->forward(x), y).backward();
///     sgd.step();
///     sgd.zero_grad();
///
/// Options, groups, state and files are those of torch::optim::SGD. Gradients may be sparse: without momentum, weight
/// decay and stochastic rounding only their rows move; with any of them the gradient is made dense first. All else is
/// as in `AdamW`.
///
/// @note Does not synchronise with the device.
class SGD : public detail::OnePassOptimizer<torch::optim::SGD, SGD, torch::optim::SGDParamState> {
 public:
  static constexpr const char* name = "SGD";
  using OnePassOptimizer::OnePassOptimizer;
  using OnePassOptimizer::step;

 private:
  friend OnePassOptimizer;
  using ParamState = torch::optim::SGDParamState;

  template <class GradientOf>
  void move(const GradientOf& gradient_of, const detail::Multiplier& multiplier) {
    std::vector<detail::SgdStep> steps;
    std::vector<std::pair<at::Tensor, at::Tensor>> buffers;  // of a parameter: kept once the step is taken
    std::vector<std::function<void()>> sparse;
    for (auto& group : param_groups()) {
      const auto& options = static_cast<const SGDOptions&>(group.options());
      for (auto& parameter : group.params()) {
        const at::Tensor& gradient = gradient_of(parameter);
        if (!gradient.defined()) continue;
        detail::check_can_be_stepped(name, parameter, gradient);
        const bool plain = options.momentum() == 0 && options.weight_decay() == 0 && !rounds(parameter);
        if (gradient.is_sparse() && plain) {
          sparse.push_back([=, &multiplier, lr = options.lr()] { move_rows(parameter, gradient, multiplier, lr); });
          continue;
        }
        steps.push_back(step_of(parameter, gradient.is_sparse() ? gradient.to_dense() : gradient, options));
        if (options.momentum() != 0) buffers.emplace_back(parameter, steps.back().momentum_buffer);
      }
    }
    take_steps(std::move(steps), multiplier);
    for (auto& move : sparse) move();
    for (auto& [parameter, buffer] : buffers) {
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<ParamState>();
      static_cast<ParamState&>(*state).momentum_buffer(std::move(buffer));
    }
  }

  detail::SgdStep step_of(const at::Tensor& parameter, const at::Tensor& gradient, const SGDOptions& options) const {
    at::Tensor buffer;
    if (const auto known = state_.find(parameter.unsafeGetTensorImpl()); known != state_.end())
      buffer = static_cast<const ParamState&>(*known->second).momentum_buffer();
    const bool first = !buffer.defined();
    if (options.momentum() != 0) buffer = detail::settled(buffer, parameter, "momentum_buffer");
    return {{options.lr(), options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(), first},
            parameter,
            gradient,
            std::move(buffer)};
  }

  static void move_rows(const at::Tensor& parameter, const at::Tensor& gradient, const detail::Multiplier& multiplier,
                        double lr) {
    const auto scaled = gradient.to(detail::state_type(parameter), /*non_blocking=*/false, /*copy=*/true);
    detail::multiply_({scaled}, multiplier);
    parameter.add_(scaled.to(parameter.scalar_type()), -lr);
  }
};

}  // namespace gradaccum::optim
