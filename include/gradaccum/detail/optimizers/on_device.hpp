// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// What ATen's fused optimizers need around them.

/// The gradients multiplied, in copies: the operations would otherwise overwrite the gradients themselves.
inline std::vector<at::Tensor> multiplied(at::TensorList gradients, const Multiplier& by) {
  if (by.is_one()) return gradients.vec();
  if (by.on_host()) return at::_foreach_mul(gradients, by.host());
  return at::_foreach_mul(gradients, by.on(gradients.front().device()).to(gradients.front().scalar_type()));
}

/// Calls `body(settings, steps, parameters, gradients)` for runs of steps that one operation can take: one device, one
/// dtype (float32 for 16 bits), the same settings; and not so many that their copies would need much memory.
template <class Step, class Body>
void for_each_batch(const std::vector<Step>& steps, const Body& body) {
  for (std::size_t from = 0, to = 0; from < steps.size(); from = to) {
    const auto& first = steps[from];
    const auto fits = [&](const Step& step) {
      return step.settings == first.settings && step.parameter.device() == first.parameter.device() &&
             step.parameter.scalar_type() == first.parameter.scalar_type();
    };
    std::vector<const Step*> batch;
    std::vector<DenseOperands> dense;
    std::vector<at::Tensor> parameters, gradients;
    for (std::int64_t elements = 0; to < steps.size() && fits(steps[to]) && elements < most_copied; ++to) {
      elements += steps[to].parameter.numel();
      batch.push_back(&steps[to]);
      dense.emplace_back(steps[to].parameter, steps[to].gradient, state_type(steps[to].parameter),
                         steps[to].rounding_key);
      parameters.push_back(dense.back().parameter());
      gradients.push_back(dense.back().gradient());
    }
    body(first.settings, batch, parameters, gradients);
    for (auto& operands : dense) operands.write_back();
  }
}

}  // namespace gradaccum::detail
