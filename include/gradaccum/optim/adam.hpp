// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>

#include <vector>

namespace gradaccum::optim {

/// LibTorch's options, so files of them are interchangeable.
using AdamOptions = torch::optim::AdamOptions;

/// torch::optim::Adam in one pass over memory, which also applies a window's deferred factor.
///
///     ga::optim::Adam adam(model->parameters(), ga::optim::AdamOptions(1e-3).amsgrad(true));
///     torch::mse_loss(model->forward(x), y).backward();
///     adam.step();
///     adam.zero_grad();
///
/// Adam: a method for stochastic optimization, Kingma and Ba, 2015; with `amsgrad`, On the convergence of Adam and
/// beyond, Reddi et al., 2018. Weight decay is added to the gradient. Otherwise like `AdamW`.
///
/// @note Does not wait for the device.
class Adam : public detail::OnePassOptimizer<Adam, torch::optim::Adam, torch::optim::AdamParamState> {
 public:
  static constexpr const char* name = "Adam";

  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions defaults = {});
  explicit Adam(std::vector<at::Tensor> parameters, AdamOptions defaults = {});

 private:
  void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/optim.ipp>
#endif
