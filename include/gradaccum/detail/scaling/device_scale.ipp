// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/device_scale.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

namespace gradaccum::detail {

/// Below it numbers lose their digits, and a division by them may give inf.
inline constexpr float smallest_on_device = std::numeric_limits<float>::min();

/// The kernel counts in 32 bits.
inline constexpr std::int64_t most_counted = std::numeric_limits<std::int32_t>::max() - 1;

GRADACCUM_INLINE DeviceScale::DeviceScale(const LossScale& scale, at::Device device) {
  c10::InferenceMode usable_in_backward(false);
  const at::TensorOptions there(device);
  value_ = at::full({}, scale.value, there.dtype(at::kFloat));
  growth_tracker_ = at::full({}, std::min(scale.growth_tracker, most_counted), there.dtype(at::kInt));
}

GRADACCUM_INLINE void DeviceScale::update(const at::Tensor& found_inf, const LossScale& by) {
  c10::InferenceMode usable_in_backward(false);
  at::NoGradGuard no_grad;
  if (const auto seen = heard_.answer()) by.check_reached(*seen, smallest_on_device);
  const auto interval = std::min(by.growth_interval, most_counted + 1);
  auto value = value_.clone(), growth_tracker = growth_tracker_.clamp_max(interval - 1);  // else it would never be due
  at::_amp_update_scale_(value, growth_tracker, found_inf, by.growth_factor, by.backoff_factor, interval);
  value.clamp_min_(smallest_on_device);
  heard_.ask(value);
  value_ = std::move(value);
  growth_tracker_ = std::move(growth_tracker);
}

GRADACCUM_INLINE LossScale DeviceScale::read(LossScale by) const {
  by.value = value_.item<float>();
  by.growth_tracker = growth_tracker_.item<int>();
  return by;
}

}  // namespace gradaccum::detail
