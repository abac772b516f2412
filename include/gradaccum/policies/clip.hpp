// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/gradients.hpp>
#include <gradaccum/policy.hpp>

namespace gradaccum {

/// Policy: scales a window's mean gradients down to an L2 norm of at most `max`, after a loss scale is divided out.
///
/// `Step::grad_norm` is the norm before clipping. With an infinite `max` the norm is only measured.
///
/// @note One read of the gradients. Does not synchronize.
struct ClipNorm {
  static constexpr std::string_view name = "clip_norm";

  double max = 1.0;  ///< > 0

  void attach(TrainerBase&) const;
  void before_step(Gradients& gradients) const;
};

/// Policy: clamps the elements of a window's mean gradients to [-max, max], after a loss scale is divided out.
///
/// @note Reads and writes the gradients once. Does not synchronize.
struct ClipValue {
  static constexpr std::string_view name = "clip_value";

  double max = 1.0;  ///< >= 0

  void attach(TrainerBase&) const;
  void before_step(Gradients& gradients) const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/clip.ipp>
#endif
