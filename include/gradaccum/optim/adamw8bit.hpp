// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/adam8bit_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include <vector>

namespace gradaccum::optim {

/// lr, betas, eps and weight_decay; amsgrad is refused.
using AdamW8bitOptions = torch::optim::AdamWOptions;

/// AdamW whose moments take 2 bytes a parameter in place of 8.
///
///     ga::optim::AdamW8bit adamw(model->parameters(), ga::optim::AdamW8bitOptions(1e-3).weight_decay(0.01));
///     ga::GradAccumulator optimizer(adamw, {.steps = 2});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// 8-bit Optimizers via Block-wise Quantization, Dettmers and others, 2021. Both moments are codes of 8 bits for a
/// number that is nearly as many digits long whatever its size, relative to the largest of their block of 256. A step
/// decodes a block, computes in float32, and codes the result, while the block is in the cache. With weights and
/// gradients that is 10.03 bytes a parameter, where AdamW takes 16.
///
/// Tensors of fewer than 4,096 elements (norms, biases) keep their moments as floats, and so do float64 and complex
/// ones. The last block of a tensor may be shorter. A second moment above 0 is never coded as 0, as elsewhere it may
/// be: its next steps would be far too large. A gradient that is not finite makes its whole block not finite.
///
/// Files are its own (`torch::save`, `named_state`); codes and scales are in them as they are. Parameters, gradients,
/// errors and stochastic rounding: as in `AdamW`.
///
/// @note Does not wait for the device. On the CPU, and by kernels of gradaccum's own on a CUDA device, it needs no
/// memory beyond AdamW's; elsewhere it is made of ATen's operations, with a copy of one parameter's moments in float32
/// at a time.
class AdamW8bit : public detail::Adam8bitOptimizer<AdamW8bit, AdamW8bitOptions> {
 public:
  static constexpr const char* name = "AdamW8bit";

  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamW8bitOptions defaults = {});
  explicit AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions defaults = {});

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/optim/adamw8bit.ipp>
#endif
