// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/core/Device.h>

namespace gradaccum::detail {

/// The kernels for tensors on CUDA devices: those of `gradaccum::compiled` if CMake found a CUDA compiler; otherwise
/// nullptr, and ATen's operations are used.
const DeviceKernels* device_kernels();
/// Replaces the kernels, or removes them (nullptr).
void set_device_kernels(const DeviceKernels* kernels);

/// The device's current stream, on which kernels are launched.
void* native_stream(c10::Device device);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/device_kernels.ipp>
#endif
