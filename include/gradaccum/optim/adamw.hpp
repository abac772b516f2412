// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/optimizers/adam_optimizers.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace gradaccum::optim {

/// LibTorch's own class of options, so that files of LibTorch's AdamW load here, and the reverse.
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
/// Decoupled weight decay regularization, Loshchilov and Hutter, 2019. Options, groups, state and files are the same as
/// for torch::optim::AdamW, so each can load files of the other.
///
/// Parameters: float32, float64, bfloat16 and float16 (with float32 state), complex; with any strides; on several
/// devices. Throws for a parameter that is listed twice and for state of another shape; overlapping parameters are not
/// detected.
///
/// Sparse gradients, as from `ga::embedding` with `.sparse`, give bitwise the same step. On the CPU it takes memory and
/// time only for rows that have had a gradient (and a pass for weight decay): moments are sparse tensors of these rows,
/// and are saved as dense tensors. On a device, and if weight decay changes every row (in `Adam`, not `AdamW`), the
/// gradient is made dense first.
///
/// @note Does not synchronize. On the CPU it uses AVX-512 or AVX2, if available, on LibTorch's threads, whose number
/// does not change results. On a CUDA device it uses this library's kernels if `gradaccum::compiled` has them,
/// otherwise ATen's fused operation.
/// @note Takes memory only for copies, about 16 MB at a time or one tensor: of tensors that are not dense, of gradients
/// in another order than their parameter, and of 16-bit parameters or gradients if ATen steps them with a factor.
class AdamW : public AdamOptimizer<AdamW, torch::optim::AdamW, AdamWOptions, torch::optim::AdamWParamState> {
 public:
  static constexpr const char* name = "AdamW";

  using AdamOptimizer::AdamOptimizer;  // takes parameters or groups of them, and options
};

/// LibTorch's own class of options, so that files of LibTorch's AdamW load here, and the reverse.
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
class Adam : public AdamOptimizer<Adam, torch::optim::Adam, AdamOptions, torch::optim::AdamParamState> {
 public:
  static constexpr const char* name = "Adam";

  using AdamOptimizer::AdamOptimizer;  // takes parameters or groups of them, and options
};

}  // namespace gradaccum::optim
