// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/device_scale.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace gradaccum::detail {

/// The smallest scale: numbers below lose digits, and a division by them may give inf.
inline constexpr float smallest_on_device = std::numeric_limits<float>::min();

/// The largest count, since the kernel counts in 32 bits.
inline constexpr std::int64_t most_counted = std::numeric_limits<std::int32_t>::max() - 1;

GRADACCUM_INLINE at::Tensor DeviceScale::growth_tracker_in(const at::Tensor& state) {
  return state.view(at::kInt).select(0, 3);
}

GRADACCUM_INLINE DeviceScale::DeviceScale(const LossScale& scale, at::Device device) {
  c10::InferenceMode usable_in_backward(false);
  at::NoGradGuard no_grad;
  set_state(memory_.take(2, device));
  value_.fill_(scale.value);
  wide_.fill_(scale.value);
  growth_tracker_in(state_).fill_(std::min(scale.growth_tracker, most_counted));
}

GRADACCUM_INLINE void DeviceScale::set_state(at::Tensor state) {
  static_assert(sizeof(ScaleState) == 2 * sizeof(double) && offsetof(ScaleState, value) == 2 * sizeof(float) &&
                offsetof(ScaleState, growth_tracker) == 3 * sizeof(float));
  state_ = std::move(state);
  value_ = state_.view(at::kFloat).select(0, 2);
  wide_ = state_.select(0, 0);
}

/// Updates the scale by LibTorch's operations.
GRADACCUM_INLINE void update_by_aten(const at::Tensor& value, const at::Tensor& wide, const at::Tensor& growth_tracker,
                                     const at::Tensor& found_inf, const LossScale& by) {
  growth_tracker.clamp_max_(by.growth_interval - 1);  // else it would never be due
  auto scale = value, tracker = growth_tracker;
  at::_amp_update_scale_(scale, tracker, found_inf, by.growth_factor, by.backoff_factor, by.growth_interval);
  scale.clamp_min_(smallest_on_device);
  wide.copy_(scale);
}

GRADACCUM_INLINE void DeviceScale::update(const at::Tensor& found_inf, LossScale by) {
  c10::InferenceMode usable_in_backward(false);
  at::NoGradGuard no_grad;
  if (const auto seen = heard_.answer()) by.check_reached(*seen, smallest_on_device);
  by.growth_interval = std::min(by.growth_interval, most_counted + 1);
  std::swap(memory_, before_);
  const auto next = memory_.take(2, state_.device()), last = state_;
  if (const auto* const kernels = device_kernels(); kernels && next.is_cuda()) {
    const c10::DeviceGuard guard(next.device());
    kernels->update_scale({found_inf.const_data_ptr<float>(), static_cast<const ScaleState*>(last.const_data_ptr()),
                           static_cast<ScaleState*>(next.mutable_data_ptr()), by.growth_factor, by.backoff_factor,
                           by.growth_interval, smallest_on_device},
                          native_stream(next.device()));
    set_state(next);
  } else {
    next.copy_(last);
    set_state(next);
    update_by_aten(value_, wide_, growth_tracker_in(state_), found_inf, by);
  }
  heard_.ask(value_);
}

GRADACCUM_INLINE LossScale DeviceScale::read(LossScale by) const {
  by.value = value_.item<float>();
  by.growth_tracker = growth_tracker_in(state_).item<int>();
  return by;
}

}  // namespace gradaccum::detail
