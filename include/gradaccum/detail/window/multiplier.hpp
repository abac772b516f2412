// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

/// The factor of gradients: a part that the host knows, and a part that only a device knows.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined
  /// Tensors of a step that the device may skip, else undefined. `found_inf`: 0-dim float32, 1 if it skips the step;
  /// `skipped_steps`: the number of skipped steps that the host does not know yet.
  at::Tensor found_inf = {}, skipped_steps = {};

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// Returns the factor as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const;

  Multiplier moved_to(at::Device device) const;
  /// Returns pointers for kernels of the device that holds all tensors. They are valid as long as this object.
  DeviceMultiplier pointers() const;
};

// Passes over lists of gradients of any device, dtype and layout, none of which synchronizes with a device.

/// Returns the `p`-norm of each non-empty gradient as one float64 tensor, on a device if any gradient is. It may be
/// stored in `memory`: see `l2_norms_on_device`. In float64 squares of finite 16- and 32-bit numbers are finite.
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory* memory = nullptr);

at::Tensor l2_norm_of(const at::Tensor& norms);

/// Returns 1 if an element is not finite, else 0: 0-dim float32. `l2_norms` is `norms(gradients, 2)`.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms);

/// Multiplies in place. The factor has float32 precision for 16-bit gradients, too.
void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/multiplier.ipp>
#endif
