// SPDX-License-Identifier: Apache-2.0
// Rejects windows by the norm of their gradients.
#pragma once

#include <gradaccum/policies/guard_norm.hpp>

#include <gradaccum/detail/types/types.hpp>

#include <ATen/ops/quantile.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void GuardNorm::Running::check() const {
  TORCH_CHECK(max > 0, "GuardNorm: max must be > 0, got ", max);
  TORCH_CHECK(max_ratio > 0, "GuardNorm: max_ratio must be > 0, got ", max_ratio);
  TORCH_CHECK(detail::is_finite(max) || detail::is_finite(max_ratio),
              "GuardNorm: max or max_ratio must be finite, else no window is rejected");
  TORCH_CHECK(quantile >= 0 && quantile <= 1, "GuardNorm: quantile must be in [0, 1], got ", quantile);
  TORCH_CHECK(history >= 1, "GuardNorm: history must be >= 1, got ", history);
}

GRADACCUM_INLINE double GuardNorm::Running::limit() const {
  check();
  if (!detail::is_finite(max_ratio) || norms_.empty() || std::ssize(norms_) < history / 2) return max;
  return std::min(max, max_ratio * at::quantile(at::tensor(norms_, at::kDouble), quantile).item<double>());
}

/// Does not keep norms of 0, as of frozen models: a median of 0 would reject every other norm.
GRADACCUM_INLINE void GuardNorm::Running::before_step(Gradients gradients) {
  const auto most = limit();
  if (gradients.items() == 0) return;
  if (!gradients.norm_before_clipping().defined())
    clip_grad_norm_(gradients, std::numeric_limits<double>::infinity());  // only measures
  const auto norm = gradients.norm_before_clipping().item<double>();
  if (!detail::is_finite(norm)) return gradients.reject("a gradient norm of NaN or infinity");
  if (norm > most) gradients.reject(fmt::format("a gradient norm of {:.4g}, above {:.4g}", norm, most));
  if (norm == 0) return;
  norms_.push_back(norm);
  if (std::ssize(norms_) > history) norms_.erase(norms_.begin());
}

GRADACCUM_INLINE void GuardNorm::Running::state(Archive& archive) {
  auto saved = at::tensor(norms_, at::kDouble);
  archive("norms", saved);
  if (!archive.loading()) return;
  const bool fits = saved.defined() && saved.layout() == at::kStrided && saved.device().is_cpu() && saved.dim() == 1 &&
                    saved.scalar_type() == at::kDouble;
  TORCH_CHECK(fits, "GuardNorm: norms of a state must be a vector of float64 on the CPU");
  saved = saved.slice(0, std::max<std::int64_t>(saved.numel() - history, 0)).contiguous();
  const auto* const first = saved.const_data_ptr<double>();
  const std::vector<double> loaded(first, first + saved.numel());
  for (const auto norm : loaded)
    TORCH_CHECK(detail::is_finite(norm) && norm > 0, "GuardNorm: norms of a state must be finite and > 0, got ", norm);
  norms_ = loaded;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
