// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/adafactor_passes.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// All steps in a few parallel passes; some at a time where many parameters have to be copied first.
inline void take_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier) {
  std::vector<AdafactorTensor> tensors;
  std::int64_t extra = 0;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    tensors.emplace_back(step, multiplier);
    extra += tensors.back().extra_elements();
    if (extra <= most_copied) continue;
    take_passes(tensors);
    tensors.clear();
    extra = 0;
  }
  take_passes(tensors);
}

/// The gradient divided by the root of the estimate of its square, which moves on.
inline at::Tensor update_on_device(const AdafactorStep& step, const at::Tensor& gradient) {
  const auto& by = step.settings;
  const auto average = [&](const at::Tensor& variance, const at::Tensor& fresh) {
    variance.mul_(1 - by.fresh2).add_(fresh.add(by.pytorch ? 0 : by.eps1), by.fresh2);
  };
  const auto square = gradient.square();
  at::Tensor estimate;
  if (step.variance.defined()) {
    average(step.variance, square);
    estimate = step.variance;
  } else {
    average(step.row_var, square.mean(-1, /*keepdim=*/true));
    average(step.col_var, square.mean(-2, /*keepdim=*/true));
    const auto mean = step.row_var.mean(-2, /*keepdim=*/true);
    estimate = step.row_var / (by.pytorch ? mean.clamp_min(by.eps1) : mean) * step.col_var;
  }
  const auto root = estimate.sqrt();
  return gradient / (by.pytorch ? root.clamp_min(by.eps1) : root);  // eps1^2 may be 0 in float32
}

/// Multiplied before it is narrowed: a sum may be out of reach of float32 until then.
inline at::Tensor multiplied_gradient(const AdafactorStep& step, const Multiplier& by) {
  const auto type = state_type(step.parameter);
  const auto narrow = at::elementSize(step.gradient.scalar_type()) < at::elementSize(type);
  const auto gradient = narrow ? step.gradient.to(type) : step.gradient;
  return by.is_one() ? gradient : gradient.mul(by.on(gradient.device()));
}

/// Waits for nothing: what is known on the device alone stays there.
inline void take_on_device(const AdafactorStep& step, const Multiplier& multiplier) {
  const auto& by = step.settings;
  const auto count = static_cast<double>(step.parameter.numel());
  if (step.parameter.numel() == 0) return;
  const DenseOperands operands(step.parameter, multiplied_gradient(step, multiplier), state_type(step.parameter),
                               step.rounding_key);
  const auto p = operands.parameter();
  auto step_size = at::full({}, by.step_size, p.options());
  if (by.scale_parameter) step_size.mul_((p.norm() / std::sqrt(count)).clamp_min_(by.eps2));
  auto update = update_on_device(step, operands.gradient());
  if (by.pytorch)
    p.mul_(1 - by.lr * by.weight_decay);
  else if (by.weight_decay != 0)
    p.mul_(1 - by.weight_decay * step_size);
  update.mul_(step_size / (update.norm() / (std::sqrt(count) * by.d)).clamp_min_(1));
  if (step.exp_avg.defined()) update = step.exp_avg.mul_(by.beta1).add_(update, 1 - by.beta1);
  p.sub_(update);
  operands.write_back();
}

inline void take_on_device(const std::vector<AdafactorStep>& steps, const Multiplier& multiplier) {
  for (auto& step : steps) take_on_device(step, multiplier);
}

}  // namespace gradaccum::detail
