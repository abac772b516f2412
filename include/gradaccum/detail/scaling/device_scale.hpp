// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device_norms.hpp>
#include <gradaccum/detail/scaling/late_number.hpp>
#include <gradaccum/detail/scaling/loss_scale.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace gradaccum::detail {

/// A loss scale that stays on a device, which updates it as `LossScale` would.
class DeviceScale {
 public:
  DeviceScale(const LossScale& scale, at::Device device);

  /// The scale as 0-dim float32 and float64 tensors, not written to while other code has them: backward keeps them.
  const at::Tensor& value() const { return value_; }
  const at::Tensor& wide() const { return wide_; }

  /// Updates the scale. `found_inf`: 0-dim float32, 1 after an overflow. Throws if the scale has left its range, some
  /// updates late, since the host does not wait for it.
  void update(const at::Tensor& found_inf, LossScale by);

  /// Returns `by` with the device's value and count, and waits for the device.
  LossScale read(LossScale by) const;

 private:
  void set_state(at::Tensor state);
  static at::Tensor growth_tracker_in(const at::Tensor& state);

  StreamMemory memory_, before_;  // of this state, and of the last one
  at::Tensor state_;              // float64 [2] as ScaleState has it
  at::Tensor value_, wide_;       // views of the state
  LateNumber heard_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/device_scale.ipp>
#endif
