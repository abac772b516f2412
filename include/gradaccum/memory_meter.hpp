// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace gradaccum {

namespace detail {
class MemoryLedger;
}

/// The number of bytes in a MiB and in a GiB, for options and tables.
inline constexpr std::int64_t MiB = std::int64_t{1} << 20, GiB = std::int64_t{1} << 30;

/// Counts the memory that LibTorch allocates in a scope exactly, on the CPU and on CUDA devices.
///
///     ga::MemoryMeter meter;
///     auto loss = torch::mse_loss(model->forward(x), y);
///     auto activations = meter.live_bytes();                // allocated in this scope, and still held
///     loss.backward();
///     std::cout << "peak: " << meter.peak_bytes() << " bytes\n";
///
/// It reads what LibTorch's allocators report (not the process's resident memory, which other things move too): on this
/// thread, on the threads of its backward passes, and wherever an `at::ThreadLocalState` carries it. Meters nest. An
/// allocation counts with the size that was asked for on the CPU, and as the caching allocator rounds it on CUDA.
///
/// Tensors count, and so do the workspaces that libraries get from the same allocators. cuBLAS allocates one at the
/// first matrix product of each thread, of 32 MiB on an H100, and keeps it. To count tensors alone, run a micro-batch
/// before the scope, forward and backward.
///
/// Memory that was allocated before the scope does not count, freed in it or not. (On the CPU LibTorch itself then
/// prints a warning about a "memory block of unknown size".) A block that is freed on a thread that does not carry the
/// scope stays counted until its address is given out again.
///
/// @note Takes a lock an allocation. Does not wait for the device. Cannot run together with LibTorch's
/// profiler on one thread: both use the same slot; whichever comes second throws.
class MemoryMeter {
 public:
  MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;
  static void* operator new(std::size_t) = delete;  // a scope: ends on its thread, before those around it

  /// Bytes allocated in this scope that are still held; on all devices together, or on one.
  std::int64_t live_bytes() const;
  std::int64_t live_bytes(c10::Device device) const;

  /// The most that `live_bytes` has been.
  std::int64_t peak_bytes() const;
  std::int64_t peak_bytes(c10::Device device) const;

  /// The peak begins anew from what is held now.
  void reset_peak();

  /// A meter can start here: no profiler of LibTorch's is at work on this thread.
  static bool possible();

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  c10::DebugInfoGuard guard_;
};

/// The most bytes of RAM that this process has had since it began, as Linux tells (VmHWM): its program, libraries and
/// mapped files included, which `MemoryMeter` does not count. Python's `resource.getrusage(RUSAGE_SELF).ru_maxrss`.
/// None where nobody tells.
std::optional<std::int64_t> peak_resident_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/memory_meter.ipp>
#endif
