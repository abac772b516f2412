// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/sgd_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <ATen/ops/_fused_sgd.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void take_rows_on_cpu(const SgdStep& s, const SgdOperand& operand) {
  const auto bytes = operand.momentum_buffer ? s.momentum_buffer.size(1) * s.momentum_buffer.element_size() : 0;
  take_rows(*s.rows, operand, sgd_kernel, s.parameter, s.rounding_key, /*all=*/false,
            [&](SgdOperand& of_row, const StepRows::Row& row) {
              if (bytes > 0)
                of_row.momentum_buffer = first_of_table(of_row.momentum_buffer, row.moments, row.number, bytes);
            });
}

GRADACCUM_INLINE void take_on_cpu(const std::vector<SgdStep>& steps, double multiplier) {
  KernelLoop<SgdOperand> loop(steps.size());
  for (auto& s : steps) {
    const auto& by = s.settings;
    SgdOperand operand{.numbers = numbers_of(by, multiplier),
                       .momentum_buffer = by.momentum != 0 ? s.momentum_buffer.mutable_data_ptr() : nullptr};
    if (s.rows)
      take_rows_on_cpu(s, operand);
    else
      loop.add(operand, sgd_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

GRADACCUM_INLINE void add_aten_moves(Moves& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_batches(moves, steps, multiplier, [&](const SgdSettings& by, at::Device device) {
    return [by, found_inf = found_inf_on(device, multiplier)](const std::vector<StepPart<SgdStep>>& batch,
                                                              at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> buffers;
      for (auto& [step, extent] : batch)
        if (by.momentum != 0) buffers.push_back(as_real(extent.of(step.momentum_buffer)));
      at::_fused_sgd_(p, g, buffers, by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                      /*maximize=*/false, by.first, std::nullopt, found_inf);
    };
  });
}

GRADACCUM_INLINE auto kernel_of(const DeviceKernels& kernels, const SgdStep&) { return kernels.sgd; }
GRADACCUM_INLINE SgdSettings kernel_settings(const SgdStep& step) { return step.settings; }
GRADACCUM_INLINE std::vector<at::Tensor> kernel_arrays(const SgdStep& step) {
  return {step.settings.momentum != 0 ? step.momentum_buffer : at::Tensor()};
}

GRADACCUM_INLINE void add_moves(Moves& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

}  // namespace gradaccum::detail
