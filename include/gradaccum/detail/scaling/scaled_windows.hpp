// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/scaled_window.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <optional>

namespace gradaccum::detail {

/// The windows of all optimizers that a loss scaler has met since its scale could last change.
class ScaledWindows {
 public:
  /// The window of the optimizer at this address. One that was flushed or discarded behind the scaler's back is heard,
  /// and makes way.
  ScaledWindow& of(const void* optimizer);

  void hear(Verdict verdict);
  /// Of all windows that have one.
  Verdict verdict();
  /// The same on a device, without a wait: 0-dim float32, 1 after an overflow; undefined where no window has a verdict.
  at::Tensor found_inf(at::Device device);
  /// Where a window's verdict is that the host does not know; none where it knows all.
  std::optional<at::Device> device_that_knows() const;
  bool any_open() const;
  void discard_open();
  /// Windows that are still open stay; `heard` is what the others leave behind.
  void forget_closed(Verdict heard);

 private:
  std::map<const void*, ScaledWindow> windows_;
  Verdict heard_ = Verdict::none;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/scaled_windows.ipp>
#endif
