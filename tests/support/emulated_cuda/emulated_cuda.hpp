// SPDX-License-Identifier: Apache-2.0
#pragma once

// An emulated CUDA device, for tests of what a device does on machines that have none: libemulated_cuda.so registers
// two devices with LibTorch when it is loaded. Their operations are those of the CPU; their memory is apart from the
// host's, which cannot read it; they count for what a host would have waited.

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <dlfcn.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace at {
struct GraphImplInterface;
}
#endif
namespace gradaccum::detail {
struct DeviceKernels;
#if __has_include(<ATen/core/GraphImplInterface.h>)
using GraphImplInterface = at::GraphImplInterface;
#else
struct GraphImplInterface;
#endif
}  // namespace gradaccum::detail

extern "C" {

/// Since the library was loaded, or since `emulated_cuda_reset_counts`, on all threads.
struct EmulatedCudaCounts {
  std::int64_t waits;             ///< of the host, for a device: blocking copies either way, item(), synchronize() ...
  std::int64_t copies_to_host;    ///< blocking or not; item() is one
  std::int64_t copies_to_device;  ///< from the host, blocking or not
  std::int64_t launches;          ///< operations on a device; views and such copies are none
};

struct EmulatedCudaMemory {
  std::int64_t bytes;        ///< in use, in blocks of 512 bytes
  std::int64_t peak_bytes;   ///< the most since the library was loaded, or since `emulated_cuda_reset_peak`
  std::int64_t blocks;       ///< in use
  std::int64_t allocations;  ///< ever made
};

EmulatedCudaCounts emulated_cuda_counts();
void emulated_cuda_reset_counts();
EmulatedCudaMemory emulated_cuda_memory(int device);
void emulated_cuda_reset_peak(int device);
/// The n-th allocation from now on, 1 the next, throws `c10::OutOfMemoryError`; 0: none does.
void emulated_cuda_fail_allocation(std::int64_t nth);
/// An allocation that would bring a device above so many bytes throws `c10::OutOfMemoryError`; < 0: no limit.
void emulated_cuda_limit_memory(int device, std::int64_t bytes);
/// From now on the first matrix product or convolution of each thread on a device allocates a workspace of so many
/// bytes there, which stays, as cuBLAS's do; 0: none does. Either way frees the workspaces of before.
void emulated_cuda_use_workspaces(std::int64_t bytes);
/// Whether new memory holds NaNs (bytes 0xFF), as it does by default, or what was there before.
void emulated_cuda_fill_new_memory(bool fill);
/// The library's own kernels for devices, which run on the host here. They take the host's memory, too.
const gradaccum::detail::DeviceKernels* emulated_cuda_kernels();
/// A graph, to capture work on a device; the caller deletes it.
gradaccum::detail::GraphImplInterface* emulated_cuda_new_graph();
}

#ifdef __clang__
// Clang's check of indirect calls takes a function of another shared library for one of another type.
#define EMULATED_CUDA_CALLS_LIBRARY __attribute__((no_sanitize("function")))
#else
#define EMULATED_CUDA_CALLS_LIBRARY
#endif

namespace testing::emulated_cuda {

/// Loads the library that the environment variable names, if it is set. Call it first in main.
inline void load(const char* variable = "GRADACCUM_EMULATED_CUDA") {
  const char* const path = std::getenv(variable);
  if (path && *path && !dlopen(path, RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
}

inline bool is_loaded() { return dlsym(RTLD_DEFAULT, "emulated_cuda_counts") != nullptr; }

/// Calls a function of the library, which must be loaded. It is looked for by name, as no program links with it.
template <class Function, class... Arguments>
EMULATED_CUDA_CALLS_LIBRARY auto call(const char* name, Arguments... arguments) {
  auto* const function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  if (!function) throw std::runtime_error(std::string(name) + ": the emulated CUDA device is not loaded");
  return function(arguments...);
}

inline EmulatedCudaCounts counts() { return call<decltype(emulated_cuda_counts)>("emulated_cuda_counts"); }
inline void reset_counts() { call<decltype(emulated_cuda_reset_counts)>("emulated_cuda_reset_counts"); }
inline EmulatedCudaMemory memory(int device = 0) {
  return call<decltype(emulated_cuda_memory)>("emulated_cuda_memory", device);
}
inline void reset_peak(int device = 0) { call<decltype(emulated_cuda_reset_peak)>("emulated_cuda_reset_peak", device); }
inline void fail_allocation(std::int64_t nth) {
  call<decltype(emulated_cuda_fail_allocation)>("emulated_cuda_fail_allocation", nth);
}
inline void limit_memory(int device, std::int64_t bytes) {
  call<decltype(emulated_cuda_limit_memory)>("emulated_cuda_limit_memory", device, bytes);
}
inline void use_workspaces(std::int64_t bytes) {
  call<decltype(emulated_cuda_use_workspaces)>("emulated_cuda_use_workspaces", bytes);
}
inline void fill_new_memory(bool fill) {
  call<decltype(emulated_cuda_fill_new_memory)>("emulated_cuda_fill_new_memory", fill);
}
inline const gradaccum::detail::DeviceKernels& kernels() {
  return *call<decltype(emulated_cuda_kernels)>("emulated_cuda_kernels");
}
inline gradaccum::detail::GraphImplInterface* new_graph() {
  return call<decltype(emulated_cuda_new_graph)>("emulated_cuda_new_graph");
}

}  // namespace testing::emulated_cuda
