// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_kernels.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <cstddef>

namespace testing {

/// While it lives, devices have kernels of the library's own: those that the emulated device runs on the host, unless
/// others are named, or none.
class KernelsOnDevice {
 public:
  static bool possible() { return emulated_cuda::is_loaded(); }
  explicit KernelsOnDevice(const gradaccum::detail::DeviceKernels& kernels = emulated_cuda::kernels()) {
    gradaccum::detail::set_device_kernels(&kernels);
  }
  explicit KernelsOnDevice(std::nullptr_t) { gradaccum::detail::set_device_kernels(nullptr); }
  KernelsOnDevice(const KernelsOnDevice&) = delete;
  KernelsOnDevice& operator=(const KernelsOnDevice&) = delete;
  ~KernelsOnDevice() { gradaccum::detail::set_device_kernels(before_); }

 private:
  const gradaccum::detail::DeviceKernels* before_ = gradaccum::detail::device_kernels();
};

}  // namespace testing
