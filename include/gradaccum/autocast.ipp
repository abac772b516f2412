// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace gradaccum {

GRADACCUM_INLINE bool is_bf16_fast([[maybe_unused]] at::Device device) {
#if defined(__x86_64__)
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return !device.is_cpu() || has_avx512;
#else
  return true;
#endif
}

GRADACCUM_INLINE Autocast::Autocast(at::Device device, std::optional<at::ScalarType> dtype, bool enabled,
                                    std::optional<bool> cache_enabled)
    : device_(checked(device)), before_(state()) {
  const State within{enabled, dtype.value_or(before_.dtype), cache_enabled.value_or(before_.cache_enabled)};
  TORCH_CHECK(!enabled || within.dtype == at::kBFloat16 || within.dtype == at::kHalf,
              "Autocast: dtype must be bfloat16 or float16, got ", within.dtype,
              "; for a part that runs in float32 pass enabled = false");
  at::autocast::increment_nesting();
  change_to(within);
}

GRADACCUM_INLINE Autocast::~Autocast() {
  change_to(before_);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

GRADACCUM_INLINE at::DeviceType Autocast::checked(at::Device device) {
  TORCH_CHECK(at::autocast::is_autocast_available(device.type()),
              "Autocast: the device must be one that has autocast, such as cuda and cpu, got ", device.type());
  return device.type();
}

GRADACCUM_INLINE Autocast::State Autocast::state() const {
  return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
          at::autocast::is_autocast_cache_enabled()};
}

/// Clears the cache if the dtype changes, as LibTorch looks up casts by parameter alone and would return the old dtype.
GRADACCUM_INLINE void Autocast::change_to(const State& next) const {
  if (next.dtype != at::autocast::get_autocast_dtype(device_)) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, next.enabled);
  at::autocast::set_autocast_dtype(device_, next.dtype);
  at::autocast::set_autocast_cache_enabled(next.cache_enabled);
}

}  // namespace gradaccum
