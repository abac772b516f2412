// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/dense.hpp>
#include <gradaccum/detail/element_loop.hpp>
#include <gradaccum/detail/multiplier.hpp>
#include <gradaccum/detail/on_device.hpp>
#include <gradaccum/detail/simd/kernels.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sgd.h>

#include <cstdint>
#include <vector>

namespace gradaccum::detail {

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;  ///< first: there was no momentum yet

  bool operator==(const SgdSettings&) const = default;
};

/// One parameter's step of SGD, with all that it reads and writes.
struct SgdStep {
  SgdSettings settings;
  DenseParameter parameter;
  at::Tensor gradient, momentum_buffer;
};

/// All steps in one parallel loop, each element read and written once.
inline void take_on_cpu(const std::vector<SgdStep>& steps, double multiplier) {
  ElementLoop loop;
  std::vector<SgdOperand> operands;
  std::vector<SgdKernel> kernels;
  operands.reserve(steps.size());
  kernels.reserve(steps.size());
  for (auto& s : steps) {
    const auto p = as_real(s.parameter.dense()), g = as_real(s.gradient);
    const auto& by = s.settings;
    operands.push_back({{multiplier, by.weight_decay, by.momentum, 1 - by.dampening, by.lr, by.nesterov, by.first},
                        p.mutable_data_ptr(),
                        g.const_data_ptr(),
                        by.momentum != 0 ? s.momentum_buffer.mutable_data_ptr() : nullptr});
    kernels.push_back(sgd_kernel(p.scalar_type(), g.scalar_type()));
    loop.add(p.numel());
  }
  loop.run([&](std::size_t i, std::int64_t from, std::int64_t count, std::int64_t) {
    kernels[i](operands[i], from, count);
  });
}

/// ATen's fused operation, for all steps with the same settings. It wants one dtype and the same strides for all.
inline void take_on_device(const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  for_each_batch(steps, [&](std::size_t from, std::size_t to) {
    std::vector<at::Tensor> p, g, b;
    for (auto i = from; i < to; ++i) {
      p.push_back(as_real(steps[i].parameter.dense()));
      g.push_back(as_real(steps[i].gradient));
      if (steps[i].settings.momentum != 0) b.push_back(as_real(steps[i].momentum_buffer));
    }
    const auto& by = steps[from].settings;
    at::_fused_sgd_(p, multiplied(g, multiplier), b, by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                    /*maximize=*/false, by.first);
  });
}

}  // namespace gradaccum::detail
