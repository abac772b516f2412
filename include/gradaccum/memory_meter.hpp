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
/// It reads what LibTorch's allocators report to this thread, the threads of its backward passes, and every thread to
/// which an `at::ThreadLocalState` carries it: the requested size on the CPU, and as rounded by the caching allocator
/// on CUDA. Meters nest. Workspaces that libraries get from the same allocators count, too: cuBLAS keeps one from the
/// first matrix product of each thread on, 32 MiB on an H100. To count tensors alone, run one micro-batch, forward and
/// backward, before the scope.
///
/// Memory allocated before the scope does not count, even if it is freed within. (On the CPU, LibTorch itself then
/// prints a warning about a "memory block of unknown size".) A block that is freed on a thread outside the scope stays
/// counted until its address is reused.
///
/// @note Takes a lock for each allocation. Does not synchronize. Throws inside LibTorch's profiler on the same
/// thread, as that does inside a meter: both use the same slot.
class MemoryMeter {
 public:
  MemoryMeter();
  MemoryMeter& operator=(MemoryMeter&&) = delete;
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

/// Returns the peak resident memory of this process in bytes, with program, libraries and mapped files, as Python's
/// `resource.getrusage(RUSAGE_SELF).ru_maxrss`; nullopt if the system does not report it (Linux's VmHWM).
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
/// Each storage counts in full and once, as the first of these kinds that one of its tensors has. A sparse tensor
/// counts with its indices and values, as does state that is kept by rows.
struct MemoryByKind {
  std::int64_t parameters = 0;       ///< and buffers
  std::int64_t optimizer_state = 0;  ///< LibTorch's optimizers and ours; others' state counts as rest
  std::int64_t gradients = 0;        ///< `.grad`, and a window's separate sums
  std::int64_t activations = 0;      ///< tensors saved by forward for backward; known only if measured
  std::int64_t state_copy = 0;       ///< host memory of `SaveState`, for the state that a thread writes
  std::int64_t rest = 0;             ///< known only if measured: batches, losses, temporaries

  std::int64_t total() const { return parameters + optimizer_state + gradients + activations + state_copy + rest; }
  bool operator==(const MemoryByKind&) const = default;
};

/// The plan of `FitMemory`: how many rows run at once, and their memory beyond what was held before an update:
/// activations, and the gradients that it accumulates. Printable.
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
/// By default glibc returns the large buffers that a loop frees after every batch to the kernel, which must then clear
/// every page again. For a small network this takes up to half of an epoch's time; Python keeps more.
///
/// On Linux, tensors of 1 MiB and more get whole pages from an allocator that keeps freed memory within a tenth above
/// the peak of all tensors. (A heap that keeps everything, as glibc's can, grows to half as much again, because of gaps
/// between tensors.) Another CPU allocator that LibTorch has been given stays. With glibc, small tensors are kept, too.
/// On other systems nothing changes, and the result is false.
///
/// Applies to the whole process and cannot be undone, so the library never calls it by itself. For glibc's heap alone,
/// environment variables do the same: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ (1073741824 both) and
/// MALLOC_TOP_PAD_ (67108864).
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/memory.ipp>
#endif
