// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/optim/optimizer.hpp>

#include <torch/optim/adam.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// The options lr, betas, eps and weight_decay; amsgrad is rejected.
using Adam8bitOptions = torch::optim::AdamOptions;

/// Adam with moments of 2 bytes per parameter instead of 8. Weight decay is added to the gradient. Otherwise like
/// `AdamW8bit`.
///
///     ga::optim::Adam8bit adam(model->parameters(), ga::optim::Adam8bitOptions(1e-3));
///     torch::mse_loss(model->forward(x), y).backward();
///     adam.step();
///     adam.zero_grad();
class Adam8bit : public Adam8bitOptimizer<Adam8bit, Adam8bitOptions> {
 public:
  static constexpr const char* name = "Adam8bit";

  using Adam8bitOptimizer::Adam8bitOptimizer;  // of the parameters or of groups of them, with options

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/optim.ipp>
#endif
