// SPDX-License-Identifier: Apache-2.0
// Clips a window's gradients before the step.
#pragma once

#include <gradaccum/policies/clip.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void ClipNorm::attach(TrainerBase&) const {
  TORCH_CHECK(max > 0, "ClipNorm: max must be > 0, got ", max);
}
GRADACCUM_INLINE void ClipNorm::before_step(Gradients& gradients) const { clip_grad_norm_(gradients, max); }

GRADACCUM_INLINE void ClipValue::attach(TrainerBase&) const {
  TORCH_CHECK(max >= 0, "ClipValue: max must be >= 0, got ", max);
}
GRADACCUM_INLINE void ClipValue::before_step(Gradients& gradients) const { clip_grad_value_(gradients, max); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
