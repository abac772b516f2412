// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/one_pass.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// LibTorch's options, so files of them are interchangeable.
using AdamWOptions = torch::optim::AdamWOptions;

/// torch::optim::AdamW in one pass over memory, which also applies a window's deferred factor.
///
///     ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-3).weight_decay(0.01));
///     ga::GradAccumulator optimizer(adamw, {.steps = 2});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.clip_grad_norm_(1.0);
///       optimizer.step();                                  // mean, clipping and update: one pass
///       optimizer.zero_grad();
///     }
///
/// Decoupled weight decay regularization, Loshchilov and Hutter, 2019. Options, groups, state and files are those of
/// torch::optim::AdamW (about ten passes over a tensor), so each can load what the other has saved.
///
/// Parameters: float32, float64, bfloat16 and float16 (with float32 state), complex; with any strides; on several
/// devices. Gradients: dense or sparse, as from `ga::embedding(tokens, table, {.sparse = true})`. The step of sparse
/// ones is the same bit for bit. On the CPU it takes memory and time only for the rows that have ever had a gradient
/// (and one pass for weight decay): moments are sparse tensors of those rows, and are saved as dense ones. On a device,
/// and if weight decay changes every row (in `Adam`, not `AdamW`), the gradient becomes dense first. Throws for a
/// parameter that is listed twice and for state of another shape; overlapping parameters are not detected.
///
/// @note Does not synchronize. On the CPU it uses AVX-512 or AVX2 if the processor has it, on LibTorch's
/// threads; the bits do not depend on their number. On a CUDA device it uses gradaccum's own kernel if
/// `gradaccum::compiled` has them, otherwise ATen's fused operation.
/// @note Takes no memory but for copies, about 16 MB at a time or one tensor: of tensors that are not dense, of
/// gradients in another order than their parameter, and where ATen steps 16-bit parameters or gradients with a factor.
class AdamW : public OnePassOptimizer<AdamW, torch::optim::AdamW, torch::optim::AdamWParamState> {
 public:
  static constexpr const char* name = "AdamW";

  using OnePassOptimizer::OnePassOptimizer;  // of the parameters or of groups of them, with options

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

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
/// @note Does not synchronize.
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
