// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam_optimizer.hpp>

#include <torch/optim/adam.h>

namespace gradaccum::optim {

using AdamOptions = torch::optim::AdamOptions;

/// torch::optim::Adam in one pass over memory, which takes a window's deferred factor on the way.
///
///     ga::optim::Adam adam(model->parameters(), ga::optim::AdamOptions(1e-3).amsgrad(true));
///     torch::mse_loss(model->forward(x), y).backward();
///     adam.step();
///     adam.zero_grad();
///
/// Adam: a method for stochastic optimization, Kingma and Ba, 2015; with `amsgrad`, On the convergence of Adam and
/// beyond, Reddi et al., 2018. Weight decay is added to the gradient. All else is as in `AdamW`.
///
/// @note Does not synchronise with the device.
class Adam : public detail::AdamOptimizer<torch::optim::Adam, Adam, AdamOptions, torch::optim::AdamParamState,
                                          /*decoupled=*/false> {
 public:
  static constexpr const char* name = "Adam";
  using AdamOptimizer::AdamOptimizer;
};

}  // namespace gradaccum::optim
