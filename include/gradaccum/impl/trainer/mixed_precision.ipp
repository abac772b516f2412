// SPDX-License-Identifier: Apache-2.0
// Runs the objective under autocast, and scales its loss for float16.
#pragma once

#include <gradaccum/policies/mixed_precision.hpp>

#include <gradaccum/detail/trainer/any_policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void MixedPrecision::attach(TrainerBase& to) {
  trainer = &to;
  static_cast<void>(forward_scope());  // throws if the device has no autocast for this dtype
  TORCH_CHECK(!scaler.on_device,
              "MixedPrecision: scaler.on_device must be false; a Trainer has to know whether its parameters moved");
  auto options = scaler;
  options.enabled = enabled && scaler.enabled && dtype == at::kHalf;
  if (options.enabled) detail::check_none_is_half(to.parameters());
  amp_scaler = std::make_shared<AmpScaler>(options);
}

GRADACCUM_INLINE std::optional<Autocast> MixedPrecision::forward_scope() const {
  if (!enabled) return std::optional<Autocast>();
  return std::optional<Autocast>(std::in_place, trainer->device(), dtype);
}

GRADACCUM_INLINE void MixedPrecision::before_backward(Loss& loss) { loss = amp_scaler->scale(std::move(loss)); }
GRADACCUM_INLINE void MixedPrecision::scale_gradients(Factor& factor) const { amp_scaler->unscale(factor); }

GRADACCUM_INLINE void MixedPrecision::after_window(const Step& step) {
  if (step.moved || step.overflowed) amp_scaler->record_overflow(step.overflowed);
  amp_scaler->update();
}

GRADACCUM_INLINE void MixedPrecision::state(Archive& archive) { amp_scaler->state(archive); }

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<MixedPrecision>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
