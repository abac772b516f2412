// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/dense.hpp>
#include <gradaccum/detail/element_loop.hpp>
#include <gradaccum/detail/multiplier.hpp>
#include <gradaccum/detail/on_device.hpp>
#include <gradaccum/detail/simd/kernels.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad, decoupled;  ///< decoupled: AdamW's weight decay
  std::int64_t step;        ///< this one, counted from 1

  bool operator==(const AdamSettings&) const = default;
};

/// One parameter's step of Adam or AdamW, with all that it reads and writes.
struct AdamStep {
  AdamSettings settings;
  DenseParameter parameter;
  at::Tensor gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

inline AdamNumbers numbers_of(const AdamSettings& by, double multiplier) {
  const double correction1 = 1 - std::pow(by.beta1, by.step), correction2 = 1 - std::pow(by.beta2, by.step);
  return {.multiplier = multiplier,
          .weight_decay = by.decoupled ? 0 : by.weight_decay,
          .kept = by.decoupled ? 1 - by.lr * by.weight_decay : 1,
          .fresh1 = 1 - by.beta1,
          .beta2 = by.beta2,
          .fresh2 = 1 - by.beta2,
          .step_size = by.lr / correction1,
          .correction = 1 / std::sqrt(correction2),
          .eps = by.eps};
}

/// All steps in one parallel loop, each element read and written once.
inline void take_on_cpu(const std::vector<AdamStep>& steps, double multiplier) {
  ElementLoop loop;
  std::vector<AdamOperand> operands;
  std::vector<AdamKernel> kernels;
  operands.reserve(steps.size());
  kernels.reserve(steps.size());
  for (auto& s : steps) {
    const auto p = as_real(s.parameter.dense()), g = as_real(s.gradient);
    const bool again = !operands.empty() && s.settings == steps[operands.size() - 1].settings;
    operands.push_back({again ? operands.back().numbers : numbers_of(s.settings, multiplier), p.mutable_data_ptr(),
                        g.const_data_ptr(), s.exp_avg.mutable_data_ptr(), s.exp_avg_sq.mutable_data_ptr(),
                        s.settings.amsgrad ? s.max_exp_avg_sq.mutable_data_ptr() : nullptr});
    kernels.push_back(adam_kernel(p.scalar_type(), g.scalar_type()));
    loop.add(p.numel());
  }
  loop.run([&](std::size_t i, std::int64_t from, std::int64_t count, std::int64_t) {
    kernels[i](operands[i], from, count);
  });
}

/// ATen's fused operation, for all steps with the same settings. It wants one dtype and the same strides for all.
inline void take_on_device(const std::vector<AdamStep>& steps, const Multiplier& multiplier) {
  for_each_batch(steps, [&](std::size_t from, std::size_t to) {
    std::vector<at::Tensor> p, g, m, v, x;
    for (auto i = from; i < to; ++i) {
      p.push_back(as_real(steps[i].parameter.dense()));
      g.push_back(as_real(steps[i].gradient));
      m.push_back(as_real(steps[i].exp_avg));
      v.push_back(as_real(steps[i].exp_avg_sq));
      if (steps[i].settings.amsgrad) x.push_back(as_real(steps[i].max_exp_avg_sq));
    }
    const auto& by = steps[from].settings;
    // The operation reads the count from the device, but does not advance it.
    const std::vector<at::Tensor> counts(
        p.size(), at::full({}, static_cast<double>(by.step), p.front().options().dtype(at::kFloat)));
    const auto fused = [&](auto operation) {
      operation(p, multiplied(g, multiplier), m, v, x, counts, by.lr, by.beta1, by.beta2, by.weight_decay, by.eps,
                by.amsgrad, /*maximize=*/false, std::nullopt, std::nullopt);
    };
    using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&);
    fused(by.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_));
  });
}

}  // namespace gradaccum::detail
