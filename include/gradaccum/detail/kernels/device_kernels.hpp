// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/core/Device.h>

namespace gradaccum::detail {

/// The kernels that there are for tensors on CUDA devices: those of `gradaccum::compiled` where CMake has found a CUDA
/// compiler; nullptr where there are none, and ATen's operations do it.
const DeviceKernels* device_kernels();
/// Others from now on, or none.
void set_device_kernels(const DeviceKernels* kernels);

/// What they are launched on: the device's current stream.
void* native_stream(c10::Device device);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/device_kernels.ipp>
#endif
