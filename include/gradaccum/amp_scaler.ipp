// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE AmpScaler::AmpScaler(AmpScalerOptions options)
    : scale_{.growth_factor = options.growth_factor,
             .backoff_factor = options.backoff_factor,
             .min_scale = options.min_scale,
             .growth_interval = options.growth_interval},
      enabled_(options.enabled),
      on_device_(options.on_device) {
  scale_.check();
  scale_.set(options.init_scale, "init_scale");
}

GRADACCUM_INLINE at::Tensor AmpScaler::scale(const at::Tensor& loss) {
  TORCH_CHECK(loss.defined(), "AmpScaler: the loss must be defined, got an undefined tensor");
  return enabled_ ? loss.mul(scale_on(loss.device())) : loss;
}

GRADACCUM_INLINE std::vector<at::Tensor> AmpScaler::scale(std::vector<at::Tensor> losses) {
  for (auto& loss : losses) loss = scale(loss);
  return losses;
}

GRADACCUM_INLINE Loss AmpScaler::scale(Loss loss) {
  if (!enabled_) return loss;
  loss.check();
  device_scale_ ? loss.seed.multiply(scale_on(loss.mean.device())) : loss.seed.multiply(scale_.value);
  loss.seed.require_finite();
  return loss;
}

GRADACCUM_INLINE void AmpScaler::unscale(Factor& factor) const {
  if (!enabled_) return;
  device_scale_ ? factor.divide_by_own(device_scale_->wide()) : factor.divide(scale_.value);
  on_device_ ? factor.require_finite_on_device() : factor.require_finite();
}

GRADACCUM_INLINE void AmpScaler::unscale_window(const detail::Scalable& optimizer) {
  if (!enabled_) return;
  auto& window = windows_.of(optimizer.address());
  TORCH_CHECK(window.stage != Stage::unscaled,
              "AmpScaler: unscale_() has already been called on this optimizer since the last update()");
  TORCH_CHECK(window.stage != Stage::stepped, "AmpScaler: unscale_() after step(); call update() first");
  TORCH_CHECK(optimizer.ready(),
              "AmpScaler: unscale_() inside a window would mix unscaled sums with scaled ones to come; put it "
              "inside `if (optimizer.ready())`, after backward");
  join(window, optimizer);
  if (optimizer.accumulates()) optimizer.window();  // takes notice of the backward in hand
  window.gradients->apply();
  if (!window.gradients->raw().empty()) window.stage = Stage::unscaled;
}

GRADACCUM_INLINE bool AmpScaler::step_window(const detail::Scalable& optimizer) {
  if (!enabled_) return optimizer.step();
  auto& window = windows_.of(optimizer.address());
  TORCH_CHECK(window.stage != Stage::stepped,
              "AmpScaler: step() has already been called on this optimizer since the last update()");
  join(window, optimizer);
  if (optimizer.accumulates()) {
    const bool moved = optimizer.step();
    if (window.closed()) window.stage = Stage::stepped;
    return moved;
  }
  window.stage = Stage::stepped;  // whatever happens: gradients may be multiplied already
  const bool moved = optimizer.step(*window.gradients);
  window.end();
  return moved;
}

GRADACCUM_INLINE void AmpScaler::join(detail::ScaledWindow& window, const detail::Scalable& optimizer) {
  if (!window.closed()) return;  // it has been joined
  detail::check_none_is_half(optimizer.parameters());
  auto joined = optimizer.window();
  unscale(joined.gradients->factor());
  window = std::move(joined);
}

GRADACCUM_INLINE void AmpScaler::update(std::optional<double> new_scale) {
  if (!enabled_ || (!new_scale && update_on_device())) return;
  using detail::Verdict;
  const auto verdict = new_scale ? Verdict::none : windows_.verdict();
  const bool waits = verdict == Verdict::clean && windows_.any_open();
  if (!new_scale && verdict == Verdict::none) return windows_.forget_closed(Verdict::none);
  auto next = current();
  const auto before = next.value;
  if (new_scale) next.set(*new_scale, "new_scale");
  if (verdict == Verdict::overflow) next.back_off();
  if (verdict == Verdict::clean && !waits) next.count_clean_update();
  if (next.value != before) windows_.discard_open();
  change_to(next);
  windows_.forget_closed(waits ? verdict : Verdict::none);
}

GRADACCUM_INLINE bool AmpScaler::update_on_device() {
  if (!on_device_ || windows_.any_open()) return false;
  if (const auto device = windows_.device_that_knows(); device && !device_scale_)
    device_scale_.emplace(scale_, *device);
  if (!device_scale_) return false;
  if (const auto found_inf = windows_.found_inf(device_scale_->value().device()); found_inf.defined()) {
    on_devices_.clear();
    device_scale_->update(found_inf, scale_);
  }
  windows_.forget_closed(detail::Verdict::none);
  return true;
}

GRADACCUM_INLINE std::map<std::string, double> AmpScaler::state_dict() const {
  if (!enabled_) return {};
  const auto now = current();
  if (device_scale_) now.check_reached(now.value, 0);  // or it could not be loaded
  return now.state_dict();
}

GRADACCUM_INLINE void AmpScaler::change_to(const detail::LossScale& next) {
  if (next.value != scale_.value || device_scale_) on_devices_.clear();
  device_scale_.reset();
  scale_ = next;
}

GRADACCUM_INLINE std::function<void()> AmpScaler::load(const std::map<std::string, double>& state) {
  if (!enabled_) return [] {};
  TORCH_CHECK(!windows_.any_open(),
              "AmpScaler: load_state_dict() needs all windows closed, whose sums have the old scale; call flush() or "
              "discard() of the accumulators first");
  auto next = scale_;
  next.load_state_dict(state);
  return [this, next] {
    change_to(next);
    windows_.forget_closed(detail::Verdict::none);
  };
}

GRADACCUM_INLINE void AmpScaler::state(Archive& archive) {
  auto entries = state_dict();
  for (auto& [key, value] : entries) archive(key, value);
  if (archive.loading()) archive.when_all_fit(load(entries));
}

/// Backward keeps the tensor, which nobody writes to meanwhile. By a 0-dim float32 tensor a 0-dim float16 loss becomes
/// float32; by a number it would not.
GRADACCUM_INLINE const at::Tensor& AmpScaler::scale_on(at::Device device) {
  auto& scale = on_devices_[device];
  if (!scale.defined()) {
    c10::InferenceMode usable_in_backward(false);
    scale = device_scale_ ? device_scale_->value().to(device, /*non_blocking=*/!device.is_cpu())
                          : at::full({}, scale_.value, at::TensorOptions(at::kFloat).device(device));
  }
  return scale;
}

}  // namespace gradaccum
