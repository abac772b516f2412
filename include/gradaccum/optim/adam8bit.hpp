// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam8bit_optimizer.hpp>

#include <torch/optim/adam.h>

namespace gradaccum::optim {

/// lr, betas, eps and weight_decay; amsgrad is refused.
using Adam8bitOptions = torch::optim::AdamOptions;

/// Adam whose moments take 2 bytes a parameter in place of 8. Weight decay is added to the gradient; all else is as in
/// `AdamW8bit`.
///
///     ga::optim::Adam8bit adam(model->parameters(), ga::optim::Adam8bitOptions(1e-3));
///     torch::mse_loss(model->forward(x), y).backward();
///     adam.step();
///     adam.zero_grad();
class Adam8bit : public detail::Adam8bitOptimizer<Adam8bit, Adam8bitOptions, /*decoupled=*/false> {
 public:
  static constexpr const char* name = "Adam8bit";
  using Adam8bitOptimizer::Adam8bitOptimizer;
};

}  // namespace gradaccum::optim
