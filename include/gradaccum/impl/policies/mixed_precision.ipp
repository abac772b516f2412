// SPDX-License-Identifier: Apache-2.0
// Runs the objective under autocast, and scales its loss for float16.
#pragma once

#include <gradaccum/policies/mixed_precision.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

struct MixedPrecisionRun {
  static constexpr std::string_view name = MixedPrecision::name;

  MixedPrecisionRun(const MixedPrecision& its_options, at::Device its_device, const AmpScalerOptions& of_scaler)
      : options(its_options), device(its_device), amp_scaler(of_scaler) {}

  const MixedPrecision& options;
  at::Device device;
  AmpScaler amp_scaler;

  std::optional<Autocast> forward_scope() const {
    if (!options.enabled) return std::optional<Autocast>();
    return std::optional<Autocast>(std::in_place, device, options.dtype);
  }
  void before_backward(Loss& loss) { loss = amp_scaler.scale(std::move(loss)); }
  void scale_gradients(Factor& factor) { amp_scaler.unscale(factor); }
  void after_window(const Step& step) {
    if (step.moved || step.overflowed) amp_scaler.record_overflow(step.overflowed);
    amp_scaler.update();
  }
  void state(Archive& archive) { amp_scaler.state(archive); }  // has a loss scale with float16 only
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> MixedPrecision::Running::start(TrainerBase& trainer) {
  TORCH_CHECK(!scaler.on_device,
              "MixedPrecision: scaler.on_device must be false; a Trainer has to know whether its parameters moved");
  auto of_scaler = scaler;
  of_scaler.enabled = enabled && scaler.enabled && dtype == at::kHalf;
  if (of_scaler.enabled) detail::check_none_is_half(trainer.parameters());
  auto run = detail::started_and_kept<detail::MixedPrecisionRun>(run_, *this, trainer.device(), of_scaler);
  static_cast<void>(run_->forward_scope());  // throws if the device has no autocast for this dtype
  return run;
}

GRADACCUM_INLINE AmpScaler& MixedPrecision::Running::amp_scaler() const {
  TORCH_CHECK(run_,
              "MixedPrecision: amp_scaler() must be called after the trainer is built, in when_built() of a policy");
  return run_->amp_scaler;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
