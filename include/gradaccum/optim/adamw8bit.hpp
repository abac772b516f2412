// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/adam_optimizers.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace gradaccum::optim {

/// The options lr, betas, eps and weight_decay; amsgrad is rejected.
using AdamW8bitOptions = torch::optim::AdamWOptions;

/// AdamW with moments of 2 bytes per parameter instead of 8.
///
///     ga::optim::AdamW8bit adamw(model->parameters(), ga::optim::AdamW8bitOptions(1e-3).weight_decay(0.01));
///     ga::GradAccumulator optimizer(adamw, {.steps = 2});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// 8-bit Optimizers via Block-wise Quantization, Dettmers et al., 2021. Both moments are 8-bit codes, relative to the
/// largest number of their block of 256, which are decoded and encoded while the block is in the cache; their relative
/// precision hardly depends on a number's magnitude. With weights and gradients this takes 10.03 bytes per parameter,
/// compared with AdamW's 16. Tensors with fewer than 4,096 elements (norms, biases), float64 and complex ones keep
/// uncompressed moments. Unlike in other implementations, a second moment above 0 is never encoded as 0, since the next
/// steps would be far too large. A non-finite gradient makes its whole block non-finite.
///
/// Files of `torch::save` and `named_state` have its codes and scales, so other optimizers cannot load them.
/// Parameters, gradients, errors and stochastic rounding are as in `AdamW`.
///
/// @note Does not synchronize, and needs no more memory than AdamW. On a device it needs this library's CUDA kernels,
/// which `gradaccum::compiled` has with CMake's `GRADACCUM_CUDA`; otherwise its step throws before anything has
/// changed.
class AdamW8bit : public Adam8bitOptimizer<AdamW8bit, AdamW8bitOptions> {
 public:
  static constexpr const char* name = "AdamW8bit";

  using Adam8bitOptimizer::Adam8bitOptimizer;  // takes parameters or groups of them, and options
};

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

  using Adam8bitOptimizer::Adam8bitOptimizer;  // takes parameters or groups of them, and options
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/adam8bit.ipp>
#endif
