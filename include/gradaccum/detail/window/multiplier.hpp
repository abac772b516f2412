// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// The one number that gradients are multiplied by: a host part, and a part that is known on a device only.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined
  /// Where the device leaves out the step: 0-dim float32, 1 if it does; and how many it has left out since the host
  /// last knew. Else undefined.
  at::Tensor found_inf = {}, left_out = {};

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// The whole product, as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const;

  /// With all that is on a device on this one.
  Multiplier moved_to(at::Device device) const;
  /// For kernels of the device on which all of it is; they hold as long as this does.
  DeviceMultiplier pointers() const;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/multiplier.ipp>
#endif
