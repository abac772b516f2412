// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include <vector>

namespace gradaccum::optim {

/// LibTorch's own: options, and files of them, are the same.
using AdamWOptions = torch::optim::AdamWOptions;

/// torch::optim::AdamW in one pass over memory, which takes a window's deferred factor on the way.
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
/// Decoupled weight decay regularization, Loshchilov and Hutter, 2019; options, groups, state and files are those of
/// torch::optim::AdamW, so either can load what the other has saved. LibTorch's own step is some ten operations for
/// each tensor, each of them a pass.
///
/// Parameters: float32, float64, bfloat16 and float16 (with float32 state), complex; of any strides; on several
/// devices. Gradients: dense, or sparse, as of `ga::embedding(tokens, table, {.sparse = true})`. By sparse gradients
/// the step is the same, to the bit; on the CPU it costs memory and time for the rows that gradients have ever had (and
/// one pass for weight decay): moments are sparse tensors of those rows, dense where they are saved. On a device, and
/// where a decay moves every row (`Adam`'s, not `AdamW`'s), the gradient becomes dense first. A parameter that is
/// listed twice, and state of another shape, are errors; parameters that share a part of their memory are not noticed.
///
/// @note Does not wait for the device. On the CPU it uses AVX-512 or AVX2 where the processor has it, on
/// LibTorch's threads; the bits do not depend on their number. On a CUDA device it is a kernel of gradaccum's own,
/// where `gradaccum::compiled` has them (the first step of a kind tries it, and waits); elsewhere ATen's fused
/// operation.
/// @note Needs no memory, but for copies of what is not dense, of gradients in another order than their parameter, and
/// where ATen steps of 16-bit parameters and of gradients with a factor: some 16 MB at a time, or one tensor.
class AdamW : public detail::OnePassOptimizer<AdamW, torch::optim::AdamW, torch::optim::AdamWParamState> {
 public:
  static constexpr const char* name = "AdamW";

  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults = {});

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/optim/adamw.ipp>
#endif
