// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace emulated_cuda {

/// Returns this thread's current device.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::StreamId current_stream(c10::DeviceIndex device);  ///< 0 is the default stream

/// Makes a device the current one while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex device) : outer_(current_device()) { set_current_device(device); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() { set_current_device(outer_); }

 private:
  c10::DeviceIndex outer_;
};

}  // namespace emulated_cuda
