// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// The kernels that there are for tensors on CUDA devices: those of `gradaccum::compiled` where CMake has found a CUDA
/// compiler; nullptr where there are none, and ATen's operations do it.
const DeviceKernels* device_kernels();
/// Others from now on, or none.
void set_device_kernels(const DeviceKernels* kernels);

/// What they are launched on: the device's current stream.
void* native_stream(c10::Device device);

/// One of them on one device.
struct KernelFinding {
  const DeviceKernels* kernels;
  int device;
  std::string name;
  OperandTypes types;

  auto operator<=>(const KernelFinding&) const = default;
};
std::string to_string(const KernelFinding& finding);

/// Whether it has shown, in this process, that it does what ATen does.
std::optional<bool> known_finding(const KernelFinding& finding);
/// False where another thread was first.
bool keep_finding(const KernelFinding& finding, bool proved);
/// All that is known.
std::map<KernelFinding, bool> kernel_findings();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/device_kernels.ipp>
#endif
