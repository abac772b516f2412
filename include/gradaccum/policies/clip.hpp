// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>
#include <gradaccum/policy.hpp>

namespace gradaccum {

/// Policy: gradients of an L2 norm of at most `max`, when the window closes: the mean over it, and unscaled.
///
/// The norm before is `Step::grad_norm`. Infinity only measures.
///
/// @note One read of the gradients. Does not synchronize.
struct ClipNorm {
  static constexpr std::string_view name = "clip_norm";

  double max = 1.0;  ///< > 0

  void attach(TrainerBase&) const;
  void before_step(Gradients& gradients) const;
};

/// Policy: gradients with elements in [-max, max], when the window closes: of the mean over it, and unscaled.
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
#include <gradaccum/impl/trainer/clip.ipp>
#endif
