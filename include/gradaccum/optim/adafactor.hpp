// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>
#include <gradaccum/optim/adafactor_options.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace gradaccum::optim {

/// Adafactor: steps like Adam's, with a row and a column of state per matrix rather than two numbers per element.
///
///     ga::optim::Adafactor adafactor(model->parameters());
///     for (auto& batch : batches) {
///       adafactor.zero_grad();
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       adafactor.step();
///     }
///
/// Adaptive Learning Rates with Sublinear Memory Cost, Shazeer and Stern, 2018. Its variants:
///
/// - torch.optim.Adafactor: `variant(AdafactorVariant::pytorch).eps({e, 1e-3})`, where e is the dtype's machine epsilon
///   (its default, None): 2.2e-16 for float64, 1.2e-7 for float32, 0.0078 for bfloat16.
/// - transformers.Adafactor: the defaults; given an lr, `relative_step(false).lr(lr)`. Its clip_threshold is `d`, its
///   decay_rate `beta2_decay`.
/// - The paper: the defaults. Its momentum is `beta1`, its slow start `warmup_init(true)`.
///
/// A tensor of three or more dimensions has a separate state for each matrix of the last two. Parameters: float32,
/// float64, bfloat16 and float16 (with float32 state), with any strides. Gradients: dense. Throws, before anything has
/// changed, for complex parameters, a parameter that is listed twice, or state of another shape.
///
/// @note Does not wait for the device. On the CPU it uses AVX-512 or AVX2 if the processor has it, on LibTorch's
/// threads; the bits do not depend on their number. If the library has its own kernels for a device, a step takes three
/// or five launches for up to 320 tensors; otherwise about twenty operations per tensor.
/// @note Memory: the state. A step adds a column and up to 16 rows per matrix, and copies of tensors that are not
/// row-major, about 16 MB at a time or one tensor's. Device kernels instead add a column per 256 columns and a row per
/// 64 rows, or fewer, of 320 tensors at a time; ATen adds three temporaries of a tensor's size.
class Adafactor : public detail::OwnOptimizer<Adafactor, AdafactorOptions, AdafactorParamState> {
 public:
  static constexpr const char* name = "Adafactor";

  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdafactorOptions defaults = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults = {});

  static void check(const AdafactorOptions& options) { options.check(); }
  bool steps_by_elements() const override { return false; }  // means run over rows, columns and whole tensors

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
  AdafactorParamState next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                 const AdafactorOptions& options) const;
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor.ipp>
#endif
