// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/optimizers/one_pass.hpp>
#include <gradaccum/gradients.hpp>

#include <torch/optim/sgd.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// LibTorch's options, so files of them are interchangeable.
using SGDOptions = torch::optim::SGDOptions;

/// torch::optim::SGD in one pass over memory, which also applies a window's deferred factor.
///
///     ga::optim::SGD sgd(model->parameters(), ga::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
///     torch::mse_loss(model->forward(x), y).backward();
///     sgd.step();
///     sgd.zero_grad();
///
/// Options, groups, state and files are the same as for torch::optim::SGD. Otherwise like `AdamW`, except that sparse
/// gradients on a device need no dense copy without momentum, weight decay and stochastic rounding.
///
/// @note Does not synchronize.
class SGD : public OnePassOptimizer<SGD, torch::optim::SGD, torch::optim::SGDParamState> {
 public:
  static constexpr const char* name = "SGD";

  using OnePassOptimizer::OnePassOptimizer;  // takes parameters or groups of them, and options

  GRADACCUM_INLINE bool judges_on_device(const Gradients& gradients) const override;

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/optim.ipp>
#endif
