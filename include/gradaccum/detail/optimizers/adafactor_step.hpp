// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

struct AdafactorSettings {
  double lr, step_size;  ///< step_size: lr or what replaces it, before it is scaled
  double fresh2;         ///< 1 - beta2 of this step
  double eps1, eps2, d, weight_decay, beta1;
  bool scale_parameter, pytorch;
};

/// One parameter's step of Adafactor, with all that it reads and writes. State is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< of stochastic rounding
};

/// On the CPU, all in a few parallel passes; some at a time where many parameters have to be copied first.
void take_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);
/// By ATen's operations. Waits for nothing: what is known on the device alone stays there.
void take_on_device(const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adafactor_step.ipp>
#endif
