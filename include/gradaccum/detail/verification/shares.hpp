// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/errors.hpp>
#include <gradaccum/detail/verification/passes.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace gradaccum::detail {

/// Each number's part of their sum.
template <class Number>
std::vector<double> shares_of(const std::vector<Number>& numbers) {
  const double all = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  std::vector<double> shares;
  for (auto number : numbers) shares.push_back(all > 0 ? static_cast<double>(number) / all : 0);
  return shares;
}

/// Some elements of each gradient, as one float64 vector on the CPU: enough to solve for a few unknowns.
inline at::Tensor sample_of(const GradientList& gradients, const GradientList& like) {
  constexpr std::int64_t most = 4096;
  std::vector<at::Tensor> samples;
  for (std::size_t i = 0; i < like.size(); ++i) {
    if (!like[i].defined()) continue;
    auto flat = (gradients[i].defined() ? gradients[i] : at::zeros_like(like[i])).flatten();
    flat = flat.slice(0, 0, flat.numel(), flat.numel() / most + 1).cpu();
    samples.push_back((flat.is_complex() ? at::view_as_real(flat.resolve_conj()).flatten() : flat).to(at::kDouble));
  }
  return at::cat(samples);
}

/// Finds what share each micro-batch's gradient has in the whole batch's, by least squares; there are more numbers
/// in a gradient than micro-batches. Nothing where the shares are not those of a mean. A gradient that is not finite
/// has none.
inline std::optional<std::vector<double>> solve_shares(VerifyPasses& passes, const ModelGuard::Modes& modes,
                                                       const GradientList& whole) {
  const auto wanted = sample_of(whole, whole);
  const auto count = static_cast<std::int64_t>(passes.rows().size());
  std::vector<at::Tensor> columns, finite;
  for (std::int64_t i = 0; i < count; ++i) {
    auto column = sample_of(passes.gradients_of(i, modes), whole);
    finite.push_back(column.isfinite().all());
    columns.push_back(finite.back().item<bool>() ? column : at::zeros_like(column));
  }
  const auto found = std::get<0>(at::linalg_lstsq(at::stack(columns, 1), wanted.unsqueeze(1), {}, "gelsd"));
  // What is found for a column of zeros may be next to 0, and such a part of NaN is NaN.
  const auto clamped = found.flatten().clamp_min(0).mul(at::stack(finite)).contiguous();
  if (std::abs(clamped.sum().item<double>() - 1) > 0.05) return std::nullopt;
  return std::vector<double>(clamped.data_ptr<double>(), clamped.data_ptr<double>() + count);
}

}  // namespace gradaccum::detail
