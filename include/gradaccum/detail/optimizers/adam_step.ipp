// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adam_step.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/batches.hpp>
#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstddef>
#include <limits>

namespace gradaccum::detail {

/// Excludes a weight decay that is added to the gradient, since it gives all rows moments.
GRADACCUM_INLINE bool steps_by_rows(const AdamSettings& by, const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  return (by.decoupled || by.weight_decay == 0) && steps_by_rows(parameter, gradient, multiplier);
}

GRADACCUM_INLINE AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter,
                                       const at::Tensor& gradient, const at::Tensor& exp_avg,
                                       const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                                       const Multiplier& multiplier) {
  AdamStep step{settings, parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq};
  std::vector<FloatMoments> moments{{step.exp_avg, "exp_avg"}, {step.exp_avg_sq, "exp_avg_sq"}};
  if (settings.amsgrad)
    moments.push_back({step.max_exp_avg_sq, "max_exp_avg_sq"});
  else
    step.max_exp_avg_sq = dense_of(max_exp_avg_sq);
  step.rows = settle(parameter, step.gradient, moments, steps_by_rows(settings, parameter, gradient, multiplier));
  return step;
}

/// Decoupled weight decay changes all rows. An eps that is 0 or denormal in float32 turns them into NaN.
GRADACCUM_INLINE bool moves_all_rows(const AdamSettings& by) {
  return (by.decoupled && by.lr * by.weight_decay != 0) || by.eps < std::numeric_limits<float>::min();
}

GRADACCUM_INLINE void take_rows_on_cpu(const AdamStep& s, const AdamOperand& operand) {
  const auto bytes = static_cast<std::int64_t>(s.exp_avg.element_size()) * s.exp_avg.size(1);
  take_rows(*s.rows, operand, adam_kernel, s.parameter, s.rounding_key, moves_all_rows(s.settings),
            [&](AdamOperand& of_row, const StepRows::Row& row) {
              for (auto* const moments : {&of_row.exp_avg, &of_row.exp_avg_sq, &of_row.max_exp_avg_sq})
                if (*moments) *moments = first_of_table(*moments, row.moments, row.number, bytes);
            });
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
    if (s.rows)
      take_rows_on_cpu(s, operand);
    else
      loop.add(operand, adam_kernel, s.parameter, s.gradient, s.rounding_key);
  }
  loop.run();
}

// The fused operation reads the step count from the device, but does not advance it.
GRADACCUM_INLINE FusedAdam::FusedAdam(const AdamSettings& by, const Multiplier& multiplier, at::Device device)
    : by_(by),
      count_(at::full({}, static_cast<double>(by.step), at::TensorOptions(at::kFloat).device(device))),
      found_inf_(found_inf_on(device, multiplier)) {
  // Stays at least 1, even if the state was replaced since the host last read the number of skipped steps.
  if (multiplier.left_out.defined()) count_.sub_(multiplier.left_out.to(device, /*non_blocking=*/true)).clamp_min_(1);
}

GRADACCUM_INLINE void FusedAdam::operator()(at::TensorList parameters, at::TensorList gradients,
                                            at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                                            at::TensorList max_exp_avg_sqs) const {
  const std::vector<at::Tensor> counts(parameters.size(), count_);
  const auto step = [&](auto fused) {
    fused(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, counts, by_.lr, by_.beta1, by_.beta2,
          by_.weight_decay, by_.eps, by_.amsgrad, /*maximize=*/false, std::nullopt, found_inf_);
  };
  using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                     double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                     const std::optional<at::Tensor>&);
  step(by_.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_));
}

GRADACCUM_INLINE void add_aten_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier) {
  add_batches(moves, steps, multiplier, [&](const AdamSettings& by, at::Device device) {
    return [fused = FusedAdam(by, multiplier, device), amsgrad = by.amsgrad](
               const std::vector<StepPart<AdamStep>>& batch, at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> m, v, x;
      for (auto& [step, extent] : batch) {
        m.push_back(as_real(extent.of(step.exp_avg)));
        v.push_back(as_real(extent.of(step.exp_avg_sq)));
        if (amsgrad) x.push_back(as_real(extent.of(step.max_exp_avg_sq)));
      }
      fused(p, g, m, v, x);
    };
  });
}

GRADACCUM_INLINE auto kernel_of(const DeviceKernels& kernels, const AdamStep&) { return kernels.adam; }
GRADACCUM_INLINE AdamSettings kernel_settings(const AdamStep& step) { return step.settings; }
GRADACCUM_INLINE std::vector<at::Tensor> kernel_arrays(const AdamStep& step) {
  return {step.exp_avg, step.exp_avg_sq, step.settings.amsgrad ? step.max_exp_avg_sq : at::Tensor()};
}

GRADACCUM_INLINE void add_moves(Moves& moves, const std::vector<AdamStep>& steps, const Multiplier& multiplier) {
  add_moves_by_kernels(moves, steps, multiplier);
}

}  // namespace gradaccum::detail
