// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_kernels.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/cuda_kernels.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

namespace gradaccum::detail {

/// Kernels, and what this process has found of them.
struct KernelsInUse {
  std::mutex mutex;
#ifdef GRADACCUM_CUDA_KERNELS
  const DeviceKernels* kernels = &cuda_kernels;
#else
  const DeviceKernels* kernels = nullptr;
#endif
  std::map<KernelFinding, bool> findings = {};
};

GRADACCUM_INLINE KernelsInUse& kernels_in_use() {
  static KernelsInUse kernels;
  return kernels;
}

GRADACCUM_INLINE const DeviceKernels* device_kernels() {
  const std::lock_guard lock(kernels_in_use().mutex);
  return kernels_in_use().kernels;
}

GRADACCUM_INLINE void set_device_kernels(const DeviceKernels* kernels) {
  const std::lock_guard lock(kernels_in_use().mutex);
  kernels_in_use().kernels = kernels;
}

GRADACCUM_INLINE void* native_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

GRADACCUM_INLINE std::string to_string(const KernelFinding& finding) {
  const auto& [parameter, gradient, rounded] = finding.types;
  return finding.name + " for parameters in " + c10::toString(parameter) +
         (rounded ? ", rounded stochastically," : "") + " and gradients in " + c10::toString(gradient);
}

GRADACCUM_INLINE std::optional<bool> known_finding(const KernelFinding& finding) {
  const std::lock_guard lock(kernels_in_use().mutex);
  const auto& findings = kernels_in_use().findings;
  const auto known = findings.find(finding);
  return known == findings.end() ? std::nullopt : std::optional(known->second);
}

GRADACCUM_INLINE bool keep_finding(const KernelFinding& finding, bool proved) {
  const std::lock_guard lock(kernels_in_use().mutex);
  return kernels_in_use().findings.emplace(finding, proved).second;
}

GRADACCUM_INLINE std::map<KernelFinding, bool> kernel_findings() {
  const std::lock_guard lock(kernels_in_use().mutex);
  return kernels_in_use().findings;
}

}  // namespace gradaccum::detail
