// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// The number that gradients are multiplied by: a host part, and a part that is known on a device only.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined
  /// Tensors of a step that the device may skip, else undefined. `found_inf`: 0-dim float32, 1 if it skips the step;
  /// `left_out`: the number of skipped steps that the host does not know of.
  at::Tensor found_inf = {}, left_out = {};

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// Returns the whole product as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const;

  /// Returns a copy with all tensors on this device.
  Multiplier moved_to(at::Device device) const;
  /// Returns pointers for kernels of the device that holds all tensors. They are valid as long as this object.
  DeviceMultiplier pointers() const;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/multiplier.ipp>
#endif
