// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>

#include <cstddef>
#include <vector>

namespace gradaccum::detail {

/// What ATen's fused optimizers need around them.

/// The gradients multiplied, in copies: the operations would otherwise overwrite the gradients themselves.
inline std::vector<at::Tensor> multiplied(const std::vector<at::Tensor>& gradients, const Multiplier& by) {
  if (by.is_one()) return gradients;
  if (by.on_host()) return at::_foreach_mul(gradients, by.host());
  return at::_foreach_mul(gradients, by.on(gradients.front().device()).to(gradients.front().scalar_type()));
}

/// Calls `body(from, to)` for runs of steps that one operation can take: one device, one dtype, the same settings; and
/// not so many that the copies of their gradients would need much memory.
template <class Step, class Body>
void for_each_batch(const std::vector<Step>& steps, const Body& body) {
  constexpr std::int64_t most = 1 << 24;  // elements
  for (std::size_t from = 0, to = 0; from < steps.size(); from = to) {
    const auto& first = steps[from];
    const auto fits = [&](const Step& step) {
      return step.settings == first.settings && step.gradient.device() == first.gradient.device() &&
             step.gradient.scalar_type() == first.gradient.scalar_type();
    };
    for (std::int64_t elements = 0; to < steps.size() && fits(steps[to]) && (to == from || elements < most); ++to)
      elements += steps[to].gradient.numel();
    body(from, to);
  }
}

}  // namespace gradaccum::detail
