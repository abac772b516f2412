// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/cuda_kernels.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace gradaccum::detail {

GRADACCUM_INLINE std::atomic<const DeviceKernels*>& kernels_in_use() {
#ifdef GRADACCUM_CUDA_KERNELS
  static std::atomic<const DeviceKernels*> kernels = &cuda_kernels;
#else
  static std::atomic<const DeviceKernels*> kernels = nullptr;
#endif
  return kernels;
}

GRADACCUM_INLINE const DeviceKernels* device_kernels() { return kernels_in_use(); }
GRADACCUM_INLINE void set_device_kernels(const DeviceKernels* kernels) { kernels_in_use() = kernels; }

GRADACCUM_INLINE void* native_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace gradaccum::detail
