// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace gradaccum::detail {

/// The loss scale and its updates: bit for bit those of PyTorch's device kernels, in float32, but on the host.
struct LossScale {
  double growth_factor = 2, backoff_factor = 0.5, min_scale = 0;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;  ///< updates since the last overflow, or since growth was last due
  float value = 1;

  void check() const;
  void set(double scale, const char* name);  ///< `name`: the user's name for it
  void back_off();
  void count_clean_update();
  /// Throws if overflows have taken the scale below `min_scale`, or to `smallest`.
  void check_reached(float scale, float smallest) const;

  std::map<std::string, double> state_dict() const;
  /// Loads the entries. An exception leaves `*this` half-changed: load into a copy.
  void load_state_dict(const std::map<std::string, double>& state);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/loss_scale.ipp>
#endif
