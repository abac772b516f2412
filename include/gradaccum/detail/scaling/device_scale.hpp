// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/scaling/late_number.hpp>
#include <gradaccum/detail/scaling/loss_scale.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace gradaccum::detail {

/// A loss scale that stays on a device, which changes it as a LossScale would.
class DeviceScale {
 public:
  DeviceScale(const LossScale& scale, at::Device device);

  /// 0-dim float32. Backward keeps it, so it is never written to: a new scale is a new tensor.
  const at::Tensor& value() const { return value_; }

  /// `found_inf`: 0-dim float32, 1 after an overflow. Throws where the scale has left its range, when the host hears of
  /// that: some updates late.
  void update(const at::Tensor& found_inf, const LossScale& by);

  /// `by` with the value and the count of the device, for which this waits.
  LossScale read(LossScale by) const;

 private:
  at::Tensor value_, growth_tracker_;
  LateNumber heard_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/device_scale.ipp>
#endif
