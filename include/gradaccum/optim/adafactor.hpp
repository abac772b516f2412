// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>
#include <gradaccum/optim/adafactor_options.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace gradaccum::optim {

/// Adafactor: steps like Adam's, with state of a row and a column for each matrix instead of two numbers an element.
///
///     ga::optim::Adafactor adafactor(model->parameters());
///     for (auto& batch : batches) {
///       adafactor.zero_grad();
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       adafactor.step();
///     }
///
/// Adaptive Learning Rates with Sublinear Memory Cost, Shazeer and Stern, 2018. With which options it is which:
///
/// - torch.optim.Adafactor: `variant(AdafactorVariant::pytorch).eps({e, 1e-3})`, where e is the dtype's machine epsilon
///   (there None): 2.2e-16 for float64, 1.2e-7 for float32, 0.0078 for bfloat16.
/// - transformers.Adafactor: the defaults; given an lr, `relative_step(false).lr(lr)`. Its clip_threshold is `d`, its
///   decay_rate `beta2_decay`.
/// - The paper: the defaults. Its momentum is `beta1`, its slow beginning `warmup_init(true)`.
///
/// Of a tensor of three dimensions or more each matrix of the last two has a state of its own. Parameters: float32,
/// float64, bfloat16 and float16 (with float32 state); of any strides. Gradients: dense. Complex parameters, one that
/// is listed twice, and state of another shape are errors, before anything has moved.
///
/// @note Does not wait for the device. On the CPU it uses AVX-512 or AVX2 where the processor has it, on
/// LibTorch's threads; the bits do not depend on their number. Where the library has kernels of its own for a device,
/// it is three or five launches for up to 37 tensors; elsewhere some twenty operations a tensor.
/// @note Memory: the state. During a step a column and up to 16 rows of each matrix more, and copies of what is not
/// row-major, some 16 MB of all that at a time, or one tensor's; with kernels of a device a column for each 256 columns
/// and a row for each 64 rows, or fewer, of 37 tensors at a time; elsewhere three temporaries of a tensor's size.
class Adafactor : public detail::OwnOptimizer<Adafactor, AdafactorOptions, AdafactorParamState> {
 public:
  static constexpr const char* name = "Adafactor";

  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdafactorOptions defaults = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults = {});

  static void check(const AdafactorOptions& options) { options.check(); }
  bool steps_by_elements() const override { return false; }  // means run over rows, columns and all

 private:
  GRADACCUM_INLINE void move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) override;
  AdafactorParamState next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                 const AdafactorOptions& options) const;
};

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor.ipp>
#endif
