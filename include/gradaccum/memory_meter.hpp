// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: memory

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
/// Counts allocations of this thread, the threads of its backward passes, and threads to which an
/// `at::ThreadLocalState` carries the meter: by the requested size on the CPU, and as rounded by the caching allocator
/// on CUDA. Meters nest. Workspaces of libraries count, too: cuBLAS allocates one at the first matrix product of each
/// thread, 32 MiB on an H100. To count tensors only, run one micro-batch, forward and backward, before the scope.
///
/// Memory allocated before the scope does not count, even if it is freed within; LibTorch then warns of a "memory block
/// of unknown size" on the CPU. A block that is freed on a thread outside the scope counts until its address is reused.
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

  /// Resets the peak to `live_bytes`.
  void reset_peak();

  /// Returns true if a meter can start: LibTorch's profiler must not be active on this thread.
  static bool possible();

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  c10::DebugInfoGuard guard_;
};

/// Returns the peak resident memory of this process in bytes, with program, libraries and mapped files, like Python's
/// `resource.getrusage(RUSAGE_SELF).ru_maxrss`. Returns nullopt if the system does not report it as Linux's VmHWM.
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
/// Each storage counts once and in full, for the first of these kinds that one of its tensors has. Sparse tensors count
/// by their indices and values, and so does optimizer state that is kept by rows.
struct MemoryByKind {
  std::int64_t parameters = 0;       ///< parameters and buffers
  std::int64_t optimizer_state = 0;  ///< of LibTorch's and this library's optimizers; of others it counts as rest
  std::int64_t gradients = 0;        ///< `.grad`, and a window's separate sums
  std::int64_t activations = 0;      ///< tensors saved by forward for backward; known only if measured
  std::int64_t state_copy = 0;       ///< host memory of `SaveState`, for the state that a thread writes
  std::int64_t rest = 0;             ///< known only if measured: batches, losses, temporaries

  std::int64_t total() const { return parameters + optimizer_state + gradients + activations + state_copy + rest; }
  bool operator==(const MemoryByKind&) const = default;
};

/// The plan of `FitMemory`: the rows per micro-batch, and their memory for activations and gradients. Printable.
struct MemoryPlan {
  /// Batches with rows of one kind.
  struct Layout {
    std::string batch;                 ///< `Float [*, 784], Long [*]`
    std::int64_t rows = 0;             ///< maximum per micro-batch
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
/// By default glibc returns large buffers that a loop frees after every batch to the kernel, which must then clear
/// every page again. For a small network this takes up to half of an epoch's time.
///
/// On Linux, tensors of 1 MiB and more get whole pages from an allocator that holds at most a tenth more than the peak
/// of all tensors. (A heap that keeps everything, as glibc's can, grows by half, because of gaps between tensors.) With
/// glibc, memory of small tensors is kept, too. A custom CPU allocator of LibTorch remains in use. Returns false on
/// other systems, without a change.
///
/// @note Applies to the whole process and cannot be undone, so the library never calls it. For glibc's heap only,
/// environment variables have the same effect: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ (1073741824 both) and
/// MALLOC_TOP_PAD_ (67108864).
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/memory.ipp>
#endif
