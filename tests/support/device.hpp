// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/device_graph.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"

#include <c10/core/Device.h>
#include <torch/version.h>
#include <cstdint>
#include <memory>

/// Functions of the emulated device, which can count and fail on request; and graphs, which all devices may have.
namespace testing {

/// Returns whether work on the device can be captured. Before LibTorch 2.15 also announces it to the emulated device.
inline bool has_graphs(c10::Device device) {
#if !__has_include(<ATen/core/GraphImplInterface.h>)
  if (emulated_cuda::is_loaded())
    gradaccum::detail::device_graph_maker() = [] {
      return std::unique_ptr<gradaccum::detail::GraphImplInterface>(emulated_cuda::new_graph());
    };
#endif
  return gradaccum::detail::has_graphs(device);
}

/// Returns whether the device is usable after an error in a capture. With CUDA before LibTorch 2.15 its random numbers
/// are not.
inline bool forgets_failed_captures() {
#if __has_include(<ATen/core/GraphImplInterface.h>)
  return true;
#else
  return emulated_cuda::is_loaded();
#endif
}

/// LibTorch reports the free memory of a device from 2.10 on.
inline constexpr bool device_memory_is_known = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10;

/// Counts the host's waits for devices since its construction.
class WaitCount {
 public:
  static bool possible() { return emulated_cuda::is_loaded(); }
  std::int64_t waits() const { return emulated_cuda::counts().waits - before_; }

 private:
  std::int64_t before_ = emulated_cuda::counts().waits;
};

/// Makes the n-th allocation of a device fail while it lives; 1 is the next.
class FailingAllocation {
 public:
  static bool possible() { return emulated_cuda::is_loaded(); }
  explicit FailingAllocation(std::int64_t nth) { emulated_cuda::fail_allocation(nth); }
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
  ~FailingAllocation() { emulated_cuda::fail_allocation(0); }
};

/// Limits a device's memory to this number of bytes while it lives, including the bytes in use.
class LimitedMemory {
 public:
  static bool possible() { return emulated_cuda::is_loaded(); }
  explicit LimitedMemory(std::int64_t bytes) { emulated_cuda::limit_memory(0, bytes); }
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;
  ~LimitedMemory() { emulated_cuda::limit_memory(0, -1); }
};

/// Makes the first matrix product of each thread on a device allocate a permanent workspace, as cuBLAS does, while it
/// lives.
class Workspaces {
 public:
  static bool possible() { return emulated_cuda::is_loaded(); }
  explicit Workspaces(std::int64_t bytes) { emulated_cuda::use_workspaces(bytes); }
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;
  ~Workspaces() { emulated_cuda::use_workspaces(0); }
};

}  // namespace testing
