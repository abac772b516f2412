// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/on_device.hpp>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE AdamNumbers numbers_of(const AdamSettings& by, double multiplier) {
  const double correction1 = 1 - std::pow(by.beta1, by.step), correction2 = 1 - std::pow(by.beta2, by.step);
  return {.multiplier = multiplier,
          .weight_decay = by.decoupled ? 0 : by.weight_decay,
          .kept = by.decoupled ? 1 - by.lr * by.weight_decay : 1,
          .beta1 = by.beta1,
          .fresh1 = 1 - by.beta1,
          .beta2 = by.beta2,
          .fresh2 = 1 - by.beta2,
          .step_size = by.lr / correction1,
          .correction = 1 / std::sqrt(correction2),
          .eps = by.eps};
}

GRADACCUM_INLINE void take_on_cpu(const std::vector<AdamStep>& steps, double multiplier) {
  KernelLoop<AdamOperand> loop(steps.size());
  AdamNumbers numbers{};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto& s = steps[i];
    if (i == 0 || !(s.settings == steps[i - 1].settings)) numbers = numbers_of(s.settings, multiplier);
    AdamOperand operand{.numbers = numbers,
                        .exp_avg = s.exp_avg.mutable_data_ptr(),
                        .exp_avg_sq = s.exp_avg_sq.mutable_data_ptr(),
                        .max_exp_avg_sq = s.settings.amsgrad ? s.max_exp_avg_sq.mutable_data_ptr() : nullptr};
    loop.add(operand, adam_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

GRADACCUM_INLINE void take_on_device(const std::vector<AdamStep>& steps, const Multiplier& multiplier) {
  for_each_batch(steps, [&](const AdamSettings& by, const std::vector<const AdamStep*>& batch, at::TensorList p,
                            at::TensorList g) {
    std::vector<at::Tensor> m, v, x;
    for (auto* step : batch) {
      m.push_back(as_real(step->exp_avg));
      v.push_back(as_real(step->exp_avg_sq));
      if (by.amsgrad) x.push_back(as_real(step->max_exp_avg_sq));
    }
    // It reads the count from the device, but does not advance it.
    const auto count = at::full({}, static_cast<double>(by.step), p.front().options().dtype(at::kFloat));
    const std::vector<at::Tensor> counts(p.size(), count);
    const auto step = [&](auto fused) {
      fused(p, multiplied(g, multiplier), m, v, x, counts, by.lr, by.beta1, by.beta2, by.weight_decay, by.eps,
            by.amsgrad, /*maximize=*/false, std::nullopt, std::nullopt);
    };
    using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&);
    step(by.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_));
  });
}

}  // namespace gradaccum::detail
