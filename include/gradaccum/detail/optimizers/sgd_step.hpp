// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/optimizers/on_device.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

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
  at::Tensor parameter, gradient, momentum_buffer;
  std::optional<std::uint64_t> rounding_key = {};  ///< of stochastic rounding
};

/// All steps in one parallel loop, each element read and written once.
inline void take_on_cpu(const std::vector<SgdStep>& steps, double multiplier) {
  KernelLoop<SgdOperand> loop(steps.size());
  for (auto& s : steps) {
    const auto& by = s.settings;
    const SgdNumbers numbers{multiplier, by.weight_decay, by.momentum, 1 - by.dampening, by.lr, by.nesterov, by.first};
    SgdOperand operand{.numbers = numbers,
                       .momentum_buffer = by.momentum != 0 ? s.momentum_buffer.mutable_data_ptr() : nullptr};
    loop.add(operand, sgd_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

/// ATen's fused operation. It wants one dtype and the same strides for all.
inline void take_on_device(const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  for_each_batch(
      steps, [&](const SgdSettings& by, const std::vector<const SgdStep*>& batch, at::TensorList p, at::TensorList g) {
        std::vector<at::Tensor> buffers;
        for (auto* step : batch)
          if (by.momentum != 0) buffers.push_back(as_real(step->momentum_buffer));
        at::_fused_sgd_(p, multiplied(g, multiplier), buffers, by.weight_decay, by.momentum, by.lr, by.dampening,
                        by.nesterov, /*maximize=*/false, by.first);
      });
}

}  // namespace gradaccum::detail
