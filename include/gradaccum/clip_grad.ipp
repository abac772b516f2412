// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/clip_grad.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace gradaccum {
GRADACCUM_INLINE at::Tensor clip_grad_norm_(Gradients gradients, double max_norm) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  return gradients.window_->clip(max_norm);
}

GRADACCUM_INLINE at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                            double norm_type, bool error_if_nonfinite) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type must be > 0, got ", norm_type);
  at::NoGradGuard no_grad;
  Gradients gradients(parameters);
  at::Tensor norm;
  if (norm_type == 2.0) {
    norm = clip_grad_norm_(gradients, max_norm);
  } else {
    norm = detail::norms(gradients.raw(), norm_type).norm(norm_type);
    detail::clip_by(gradients.factor(), norm, max_norm);
  }
  TORCH_CHECK(!error_if_nonfinite || norm.isfinite().item<bool>(), "clip_grad_norm_: the norm must be finite, got ",
              norm.item<double>(), "; pass error_if_nonfinite = false to clip all the same");
  gradients.apply();
  return norm;
}

GRADACCUM_INLINE void clip_grad_value_(Gradients gradients, double clip_value) {
  TORCH_CHECK(clip_value >= 0, "clip_grad_value_: clip_value must be >= 0, got ", clip_value);
  at::NoGradGuard no_grad;
  for (const auto& gradient : gradients.values()) {
    if (!gradient.is_sparse()) {
      gradient.clamp_(-clip_value, clip_value);
    } else {  // the duplicates of a sparse gradient are summed first
      const auto summed = gradient.coalesce();
      summed._values().clamp_(-clip_value, clip_value);
      gradient.copy_(summed);
    }
  }
}

GRADACCUM_INLINE void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  clip_grad_value_(Gradients(parameters), clip_value);
}

}  // namespace gradaccum
