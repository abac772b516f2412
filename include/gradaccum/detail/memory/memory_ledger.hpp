// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The sizes of memory blocks by address: a hash table with open addressing, for a look-up at every allocation.
/// (`std::unordered_map` allocates a node for each, which made an allocation half as expensive again.)
class BlockTable {
 public:
  /// Stores a block's size, > 0; 0 removes the block. Returns the size that was stored before, or 0.
  std::int64_t exchange(const void* block, std::int64_t bytes);

 private:
  struct Slot {
    const void* block = nullptr;
    std::int64_t bytes = 0;
  };

  std::size_t home(const void* block) const;
  std::size_t next(std::size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
  std::size_t find(const void* block) const;
  void erase(std::size_t gap);
  void grow();

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
    void add(std::int64_t bytes);
  };

  explicit MemoryLedger(std::shared_ptr<MemoryLedger> surrounding) : surrounding_(std::move(surrounding)) {}

  /// Returns true if a ledger can start on this thread: LibTorch's profilers use the same slot, and none is active.
  static bool possible();
  /// The ledger that receives this thread's allocations, if any. `impossible`: the error if none can.
  static std::shared_ptr<MemoryLedger> innermost(const char* impossible);

  GRADACCUM_INLINE void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                                          c10::Device device) override;
  bool memoryProfilingEnabled() const override { return true; }

  Account total() const;
  Account of(c10::Device device) const;
  void reset_peak();

 private:
  void add(c10::Device device, std::int64_t bytes);
  Account& account_of(c10::Device device);

  std::shared_ptr<MemoryLedger> surrounding_;
  mutable std::mutex mutex_;
  BlockTable held_;
  Account total_;
  std::vector<std::pair<c10::Device, Account>> by_device_;  // few: faster than a map
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/memory_ledger.ipp>
#endif
