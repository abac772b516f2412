// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/tensor_lists.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <vector>

namespace gradaccum {
namespace detail {

inline void multiply_by_clip(Gradients& gradients, const at::Tensor& norm, double max_norm) {
  if (std::isinf(max_norm)) return;  // inf / inf would be NaN
  at::NoGradGuard no_grad;
  if (!norm.device().is_cpu())
    return gradients.factor().multiply(norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0));
  const double factor = 1 / (norm.item<double>() + 1e-6) * max_norm;
  gradients.factor().multiply(factor > 1 ? 1.0 : factor);  // NaN stays NaN
}

}  // namespace detail

/// Clips a window's gradients to an L2 norm of at most `max_norm`, as one more deferred factor; returns the norm
/// before.
///
///     if (optimizer.ready()) {
///       auto norm = ga::clip_grad_norm_(optimizer.gradients(), 1.0);      // 0-dim float64; nobody has waited for it
///       if (optimizer.updates() % 100 == 0) std::cout << norm.item<double>() << '\n';
///     }
///     optimizer.step();
///
/// The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. `max_norm` is > 0; infinity
/// only measures. A norm of NaN makes the gradients NaN, as there.
///
/// @note Does not synchronise with the device.
inline at::Tensor clip_grad_norm_(Gradients gradients, double max_norm) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  const auto norm = gradients.norm();
  detail::multiply_by_clip(gradients, norm, max_norm);
  gradients.set_norm_before_clipping(norm);
  return norm;
}

/// torch.nn.utils.clip_grad_norm_ without the wait: clips the gradients of `parameters` in place, and returns the
/// `norm_type`-norm (> 0, or infinity) that they had before, 0-dim float64.
///
///     torch::mse_loss(model->forward(x), y).backward();
///     at::Tensor norm = ga::clip_grad_norm_(model->parameters(), 1.0);
///     optimizer.step();
///
/// Beyond LibTorch's own: parameters on several devices, sparse gradients, and shared parameters, which count once.
/// In a loop with a GradAccumulator call the accumulator's `clip_grad_norm_`: this one would clip an unfinished sum.
///
/// @note Synchronises with the device only if `error_if_nonfinite` is set: it throws then, and nothing is clipped.
inline at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                                  bool error_if_nonfinite = false) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type must be > 0, got ", norm_type);
  at::NoGradGuard no_grad;
  Gradients gradients(parameters);
  const auto norm = norm_type == 2.0 ? gradients.norm() : detail::norms(gradients.raw(), norm_type).norm(norm_type);
  TORCH_CHECK(!error_if_nonfinite || norm.isfinite().item<bool>(), "clip_grad_norm_: the norm must be finite, got ",
              norm.item<double>(), "; pass error_if_nonfinite = false to clip all the same");
  detail::multiply_by_clip(gradients, norm, max_norm);
  gradients.apply();
  return norm;
}

/// Clamps every element of a window's gradients, in their true size, to [-clip_value, clip_value]; at once.
///
/// @note Does not synchronise with the device.
inline void clip_grad_value_(Gradients gradients, double clip_value) {
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

/// torch.nn.utils.clip_grad_value_, for sparse gradients and shared parameters too.
inline void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  clip_grad_value_(Gradients(parameters), clip_value);
}

}  // namespace gradaccum
