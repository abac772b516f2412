// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// The sizes of memory blocks by address: a hash table with open addressing, for a look-up at every allocation.
/// (`std::unordered_map` allocates a node per block, which made allocations 1.5 times as expensive.)
class BlockTable {
 public:
  /// Stores a block's size, > 0; 0 removes the block. Returns the size that was stored before, or 0.
  std::int64_t exchange(const void* block, std::int64_t bytes) {
    const auto slot = find(block);
    const auto before = slots_[slot].bytes;
    if (bytes > 0) slots_[slot] = {block, bytes};
    if (bytes > 0 && before == 0 && ++count_ * 2 > slots_.size()) grow();
    if (bytes == 0 && before > 0) erase(slot);
    return before;
  }

 private:
  struct Slot {
    const void* block = nullptr;
    std::int64_t bytes = 0;
  };

  /// Returns the upper bits of a product, which depend on all bits of its factors.
  std::size_t home(const void* block) const {
    return static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(block) * 0x9E3779B97F4A7C15u) >> shift_);
  }
  std::size_t next(std::size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
  /// Finds the slot that the block has, or would get.
  std::size_t find(const void* block) const {
    auto slot = home(block);
    while (slots_[slot].block && slots_[slot].block != block) slot = next(slot);
    return slot;
  }
  /// Moves the following blocks into the gap, unless that would put them before their home slot.
  void erase(std::size_t gap) {
    --count_;
    for (auto slot = next(gap); slots_[slot].block; slot = next(slot)) {
      const auto from_home = (slot - home(slots_[slot].block)) & (slots_.size() - 1);
      const auto from_gap = (slot - gap) & (slots_.size() - 1);
      if (from_home >= from_gap) slots_[std::exchange(gap, slot)] = slots_[slot];
    }
    slots_[gap] = {};
  }
  void grow() {
    const auto old = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
    --shift_;
    for (auto& slot : old)
      if (slot.block) slots_[find(slot.block)] = slot;
  }

  int shift_ = 64 - 10;
  std::vector<Slot> slots_ = std::vector<Slot>(1 << 10);
  std::size_t count_ = 0;
};

/// Receives each allocation that LibTorch reports, from any thread, and forwards it to the surrounding ledger.
///
/// It stores blocks by address: LibTorch also reports frees of older blocks, on the CPU sometimes with a stale size.
class MemoryLedger : public c10::MemoryReportingInfoBase, public std::enable_shared_from_this<MemoryLedger> {
 public:
  struct Account {
    std::int64_t live = 0, peak = 0;
    void add(std::int64_t bytes) { peak = std::max(peak, live += bytes); }
  };

  explicit MemoryLedger(std::shared_ptr<MemoryLedger> surrounding) : surrounding_(std::move(surrounding)) {}

  /// Returns true if a ledger can start on this thread: LibTorch's profilers use the same slot, and none is active.
  static bool possible();
  /// Returns the ledger that receives this thread's allocations, if any. `impossible`: the error if none can.
  static std::shared_ptr<MemoryLedger> innermost(const char* impossible);

  GRADACCUM_INLINE void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                                          c10::Device device) override;
  bool memoryProfilingEnabled() const override { return true; }

  Account total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  Account of(c10::Device device) const {
    const std::lock_guard lock(mutex_);
    for (auto& [known, account] : by_device_)
      if (known == device) return account;
    return {};
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    total_.peak = total_.live;
    for (auto& [device, account] : by_device_) account.peak = account.live;
  }

 private:
  void add(c10::Device device, std::int64_t bytes);

  std::shared_ptr<MemoryLedger> surrounding_;
  mutable std::mutex mutex_;
  BlockTable held_;
  Account total_;
  std::vector<std::pair<c10::Device, Account>> by_device_;  // few: faster than a map
};

/// Records the allocations of a scope, so that single ones can be excluded from the sums later.
class AllocationLog final : public MemoryLedger {
 public:
  using MemoryLedger::MemoryLedger;

  GRADACCUM_INLINE void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                                          c10::Device device) override;

  /// Returns true if the memory of a live tensor was allocated in this scope.
  bool has(const at::Tensor& tensor) const {
    const std::lock_guard lock(mutex_);
    return live_.contains(tensor.storage().data());
  }

  /// Returns the current position in the log.
  std::size_t now() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

  /// Excludes the memory of a live tensor from the sums, from its allocation on.
  void exclude(const at::Tensor& tensor);

  struct Bytes {
    std::int64_t live = 0, peak = 0;
  };
  /// Returns the bytes live at `to`, and the maximum of live bytes since `from`.
  Bytes between(std::size_t from, std::size_t to) const;

 private:
  struct Entry {
    std::int64_t bytes;      // negative if freed
    std::size_t allocation;  // index of a freed block's allocation
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<const void*, std::size_t> live_;  // allocation index by live block
  std::vector<std::size_t> excluded_;
};

/// Logs the allocations of a scope, and forwards them to an enclosing ledger.
class [[nodiscard]] AllocationScope {
 public:
  /// `impossible` is the error message inside LibTorch's profiler.
  explicit AllocationScope(const char* impossible)
      : log_(std::make_shared<AllocationLog>(MemoryLedger::innermost(impossible))),
        guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}
  AllocationLog& operator*() const { return *log_; }
  AllocationLog* operator->() const { return log_.get(); }

 private:
  std::shared_ptr<AllocationLog> log_;
  c10::DebugInfoGuard guard_;
};

/// Copies a host tensor to a device, to CUDA from pinned memory, so that the host does not wait.
at::Tensor copied_to(at::Device device, const at::Tensor& of_host);

/// Bytes on a device: of all processes, as its driver counts, and of this one's allocator.
struct DeviceMemory {
  std::int64_t free = 0, total = 0, reserved = 0, allocated = 0;
};
/// Returns nullopt for a device whose allocator does not report them, and with a LibTorch older than 2.10.
std::optional<DeviceMemory> device_memory(c10::Device device);

/// Returns the allocator's unused memory to the device, where LibTorch can.
void empty_device_cache(c10::Device device);

/// Returns the bytes in use, if known: on a GPU by all processes, from its driver; on the CPU by this one, from Linux.
std::optional<std::int64_t> occupied_memory(c10::Device device);

/// Returns true if at least half a second has passed since the `last` query, or if there was none: queries take long.
bool is_time_to_ask(std::optional<std::chrono::steady_clock::time_point> last);

/// Calls `use` with the storage of a tensor: twice for a sparse one, never for one without memory.
void for_each_storage(const at::Tensor& tensor, c10::function_ref<void(const c10::Storage&)> use);

/// Counts tensors' memory, each storage once, without keeping the memory.
class StorageCount {
 public:
  /// Returns the bytes of this tensor that have not been counted yet.
  std::int64_t add(const at::Tensor& tensor) {
    std::int64_t bytes = 0;
    for_each_storage(tensor, [&](const c10::Storage& storage) {
      if (counted_.insert(storage.unsafeGetStorageImpl()).second) bytes += static_cast<std::int64_t>(storage.nbytes());
    });
    return bytes;
  }

 private:
  std::unordered_set<const void*> counted_;
};

/// Reads the first 64 KiB of a file of /proc or /sys, which do not report a size. Empty if it cannot be read.
std::string text_of_system_file(const std::filesystem::path& path);

/// Returns the bytes after `name:` or `name ` in the format of /proc/meminfo or memory.stat, whose unit may be kB;
/// nullopt if the name is missing.
std::optional<std::int64_t> bytes_after(const std::string& name, const std::string& lines);

/// Returns the folders that may limit a process by this controller (`cpu`, `memory`), relative to the mount of control
/// groups. `groups` is the text of /proc/self/cgroup; each group comes with all groups above it.
std::vector<std::filesystem::path> control_groups(const std::string& groups, const std::string& controller);

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/memory.ipp>
#endif
