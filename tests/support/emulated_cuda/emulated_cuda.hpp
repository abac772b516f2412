// SPDX-License-Identifier: Apache-2.0
#pragma once

// An emulated CUDA device, to test code for devices on machines without one: libemulated_cuda.so registers two devices
// with LibTorch when it is loaded. Their operations are the CPU's; the host cannot read their memory; and they count
// the operations for which a host would wait.

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

/// Counts on all threads since the library was loaded, or since `emulated_cuda_reset_counts`.
struct EmulatedCudaCounts {
  std::int64_t waits;             ///< waits of the host: blocking copies in both directions, item(), synchronize() ...
  std::int64_t copies_to_host;    ///< blocking or not; item() is one
  std::int64_t copies_to_device;  ///< from the host, blocking or not
  std::int64_t launches;          ///< operations on a device, except views and copies from or to the host
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
/// Makes the n-th allocation from now on, 1 the next, throw `c10::OutOfMemoryError`; 0: none.
void emulated_cuda_fail_allocation(std::int64_t nth);
/// Makes allocations beyond this number of bytes on a device throw `c10::OutOfMemoryError`; < 0: no limit.
void emulated_cuda_limit_memory(int device, std::int64_t bytes);
/// Makes the first matrix product or convolution of each thread on a device allocate a permanent workspace of this
/// size, like cuBLAS; 0: none. Frees earlier workspaces.
void emulated_cuda_use_workspaces(std::int64_t bytes);
/// Sets whether new memory is filled with NaNs (bytes 0xFF), the default, or keeps its old content.
void emulated_cuda_fill_new_memory(bool fill);
/// The library's kernels for devices, which run on the host here, and also accept its memory.
const gradaccum::detail::DeviceKernels* emulated_cuda_kernels();
/// A graph, to capture work on a device; the caller deletes it.
gradaccum::detail::GraphImplInterface* emulated_cuda_new_graph();
}

#ifdef __clang__
// Clang's check of indirect calls mistakes the type of a function in another shared library.
#define EMULATED_CUDA_CALLS_LIBRARY __attribute__((no_sanitize("function")))
#else
#define EMULATED_CUDA_CALLS_LIBRARY
#endif

namespace testing::emulated_cuda {

/// Loads the library that the environment variable names, if it is set. Call this first in main.
inline void load(const char* variable = "GRADACCUM_EMULATED_CUDA") {
  const char* const path = std::getenv(variable);
  if (path && *path && !dlopen(path, RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
}

inline bool is_loaded() { return dlsym(RTLD_DEFAULT, "emulated_cuda_counts") != nullptr; }

/// Calls a function of the library, which must be loaded. Finds it by name, because programs do not link with it.
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
