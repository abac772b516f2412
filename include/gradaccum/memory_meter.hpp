// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {

namespace detail {
class MemoryLedger;
}

/// The number of bytes in a MiB and in a GiB, for options and tables.
inline constexpr std::int64_t MiB = std::int64_t{1} << 20, GiB = std::int64_t{1} << 30;

/// Counts exactly what LibTorch allocates within a scope, on the CPU and on CUDA devices.
///
///     ga::MemoryMeter meter;
///     auto loss = torch::mse_loss(model->forward(x), y);
///     auto activations = meter.live_bytes();                // allocated in this scope, and still held
///     loss.backward();
///     std::cout << "peak: " << meter.peak_bytes() << " bytes\n";
///
/// The meter reads what LibTorch's allocators report, not the resident memory of the process, which other things change
/// too. It covers this thread, the threads of its backward passes, and every thread to which an `at::ThreadLocalState`
/// carries it. Meters nest. Allocations count with the requested size on the CPU, and as rounded by the caching
/// allocator on CUDA.
///
/// Tensors count, and so do workspaces that libraries get from the same allocators. cuBLAS allocates one at the first
/// matrix product of each thread, 32 MiB on an H100, and keeps it. To count tensors alone, run one micro-batch, forward
/// and backward, before the scope.
///
/// Memory allocated before the scope does not count, even if it is freed within. (On the CPU, LibTorch itself then
/// prints a warning about a "memory block of unknown size".) A block that is freed on a thread outside the scope stays
/// counted until its address is reused.
///
/// @note Takes a lock for each allocation. Does not wait for the device. Cannot be combined with LibTorch's profiler on
/// one thread: both use the same slot, and the second throws.
class MemoryMeter {
 public:
  MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;
  static void* operator new(std::size_t) = delete;  // scopes nest and end on their thread

  /// Returns the bytes allocated in this scope and still held, on all devices or on one.
  std::int64_t live_bytes() const;
  std::int64_t live_bytes(c10::Device device) const;

  /// Returns the maximum of `live_bytes`.
  std::int64_t peak_bytes() const;
  std::int64_t peak_bytes(c10::Device device) const;

  /// Resets the peak to what is held now.
  void reset_peak();

  /// Returns true if a meter can start here: LibTorch's profiler is not active on this thread.
  static bool possible();

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  c10::DebugInfoGuard guard_;
};

/// Returns the peak resident memory of this process in bytes, from Linux (VmHWM). It includes the program, libraries
/// and mapped files, which `MemoryMeter` does not count. Equals Python's `resource.getrusage(RUSAGE_SELF).ru_maxrss`.
/// Returns nullopt if the system does not report it.
std::optional<std::int64_t> peak_resident_memory();

/// The bytes held by the tensors of a training, by purpose.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     trainer.fit(batches);
///     const ga::MemoryByKind bytes = trainer.memory_by_kind();
///     std::cout << bytes.parameters << " + " << bytes.optimizer_state << '\n';
///
/// Each storage counts in full and once, even if several tensors share it or a tensor views only part of it. It counts
/// as the first of these kinds that one of its tensors has. A sparse tensor counts with its indices and values, as does
/// state that is kept by rows.
struct MemoryByKind {
  std::int64_t parameters = 0;       ///< and buffers
  std::int64_t optimizer_state = 0;  ///< LibTorch's optimizers and ours; others' state counts as rest
  std::int64_t gradients = 0;        ///< `.grad`, and a window's separate sums
  std::int64_t activations = 0;      ///< tensors saved by forward for backward; known only if measured
  std::int64_t rest = 0;             ///< known only if measured: batches, losses, temporaries

  std::int64_t total() const { return parameters + optimizer_state + gradients + activations + rest; }
  bool operator==(const MemoryByKind&) const = default;
};

/// The plan of `FitMemory`: how many rows run at once, and their memory. Printable. Bytes are those beyond the memory
/// held before an update: activations, and the gradients that the update accumulates.
struct MemoryPlan {
  /// Batches with rows of one kind.
  struct Layout {
    std::string batch;                 ///< `Float [*, 784], Long [*]`
    std::int64_t rows = 0;             ///< maximum that runs at once
    std::int64_t predicted_bytes = 0;  ///< expected peak for that many
    std::int64_t measured_bytes = 0;   ///< measured peak; 0 until measured
  };
  std::vector<Layout> layouts;          ///< in the order of their first batches
  std::int64_t budget = 0;              ///< given, or found; 0: unknown
  std::int64_t gradient_bytes = 0;      ///< part of the budget held between micro-batches
  std::int64_t checkpoint_budget = 0;   ///< part of the budget for `CheckpointedSequential`; 0: they keep everything
  std::vector<std::int64_t> last_rows;  ///< rows of each micro-batch of the last batch
  std::int64_t replays = 0;             ///< number of times a batch was restarted with fewer rows
};

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

/// Makes the process keep the memory of freed CPU tensors for the next ones. Returns true if it does.
///
///     ga::keep_freed_memory();                           // first thing in main()
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       sgd.step();
///       sgd.zero_grad();
///     }
///
/// A training loop frees and allocates the same buffers for every batch. By default glibc returns large ones to the
/// kernel each time, which must then clear every page again. For a small network this takes up to half of an epoch's
/// time, and is a reason why C++ programs have been slower than Python's, which keeps more.
///
/// On Linux, tensors of 1 MiB and more get whole pages from an allocator that keeps freed memory, but returns enough to
/// stay within a tenth above the peak of all tensors. A heap that keeps everything, as glibc's can, grows to half as
/// much again, because of gaps between tensors that are freed in another order than they were allocated. If LibTorch
/// has already been given another CPU allocator, that stays. With glibc, small tensors are kept, too. On other systems
/// nothing changes, and the result is false.
///
/// Applies to the whole process and cannot be undone: the process keeps its peak. So the library never calls it by
/// itself. For glibc's heap alone, environment variables do the same: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_
/// (1073741824 both) and MALLOC_TOP_PAD_ (67108864).
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/memory.ipp>
#endif
