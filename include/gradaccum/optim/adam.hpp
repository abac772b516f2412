// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/optim/optimizer.hpp>

#include <torch/optim/adam.h>

#include <gradaccum/impl/begin.ipp>

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
class Adam : public OnePassOptimizer<Adam, torch::optim::Adam, torch::optim::AdamParamState> {
 public:
  static constexpr const char* name = "Adam";

  using OnePassOptimizer::OnePassOptimizer;  // of the parameters or of groups of them, with options

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/optim.ipp>
#endif
