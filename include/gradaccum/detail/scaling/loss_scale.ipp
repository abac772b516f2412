// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/loss_scale.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <cmath>

namespace gradaccum::detail {

GRADACCUM_INLINE void LossScale::check() const {
  TORCH_CHECK(growth_factor > 1 && std::isfinite(growth_factor),
              "AmpScaler: growth_factor must be > 1 and finite, got ", growth_factor);
  TORCH_CHECK(backoff_factor > 0 && backoff_factor < 1, "AmpScaler: backoff_factor must be > 0 and < 1, got ",
              backoff_factor);
  TORCH_CHECK(growth_interval >= 1, "AmpScaler: growth_interval must be >= 1, got ", growth_interval);
  TORCH_CHECK(min_scale >= 0 && std::isfinite(min_scale), "AmpScaler: min_scale must be >= 0 and finite, got ",
              min_scale);
}

GRADACCUM_INLINE void LossScale::set(double scale, const char* name) {
  const auto rounded = static_cast<float>(scale);
  TORCH_CHECK(rounded > 0 && std::isfinite(rounded), "AmpScaler: ", name, " must be > 0 and finite in float32, got ",
              scale);
  TORCH_CHECK(scale >= min_scale, "AmpScaler: ", name, " must be >= min_scale (", min_scale, "), got ", scale);
  value = rounded;
}

GRADACCUM_INLINE void LossScale::back_off() {
  const auto next = static_cast<float>(value * backoff_factor);
  check_reached(next, 0);
  value = next;
  growth_tracker = 0;
}

GRADACCUM_INLINE void LossScale::check_reached(float scale, float smallest) const {
  TORCH_CHECK(scale > smallest && scale >= min_scale, "AmpScaler: the scale must stay ",
              min_scale > 0 ? c10::str(">= min_scale (", min_scale, ")") : "> 0", ", and overflows take it to ", scale,
              ": gradients overflow at every scale; look for inf or NaN in the data and the loss");
}

GRADACCUM_INLINE void LossScale::count_clean_update() {
  if (++growth_tracker < growth_interval) return;
  const auto next = static_cast<float>(value * growth_factor);
  if (std::isfinite(next)) value = next;
  growth_tracker = 0;
}

GRADACCUM_INLINE std::map<std::string, double> LossScale::state_dict() const {
  return {{"scale", value},
          {"growth_factor", growth_factor},
          {"backoff_factor", backoff_factor},
          {"growth_interval", static_cast<double>(growth_interval)},
          {"_growth_tracker", static_cast<double>(growth_tracker)}};
}

GRADACCUM_INLINE void LossScale::load_state_dict(const std::map<std::string, double>& state) {
  TORCH_CHECK(!state.empty(), "AmpScaler: the state must not be empty; it was saved by a scaler that was disabled");
  const auto entry = [&](const char* key) {
    const auto found = state.find(key);
    TORCH_CHECK(found != state.end(), "AmpScaler: the state must have the entry '", key, "', and has none");
    return found->second;
  };
  const auto count = [&](const char* key) {
    const double number = entry(key);
    TORCH_CHECK(number >= 0 && number <= 0x1p53 && number == std::floor(number), "AmpScaler: ", key,
                " must be a whole number >= 0, got ", number);
    return static_cast<std::int64_t>(number);
  };
  set(entry("scale"), "scale");
  growth_factor = entry("growth_factor");
  backoff_factor = entry("backoff_factor");
  growth_interval = count("growth_interval");
  growth_tracker = count("_growth_tracker");
  check();
}

}  // namespace gradaccum::detail
