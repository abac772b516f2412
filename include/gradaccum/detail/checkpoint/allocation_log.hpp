// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace gradaccum::detail {

/// Records the allocations of a scope, so that some of them can be left out of the sums later.
class AllocationLog final : public MemoryLedger {
 public:
  using MemoryLedger::MemoryLedger;

  GRADACCUM_INLINE void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                                          c10::Device device) override;

  /// Returns whether the memory of a live tensor was allocated in this scope.
  bool has(const at::Tensor& tensor) const;

  /// The current position in the log.
  std::size_t now() const;

  /// Excludes the memory of a live tensor from the sums, from its allocation on.
  void leave_out(const at::Tensor& tensor);

  struct Bytes {
    std::int64_t live = 0, peak = 0;
  };
  /// The bytes live at `to`, and the most live at any time since `from`.
  Bytes between(std::size_t from, std::size_t to) const;

 private:
  struct Entry {
    std::int64_t bytes;  // negative if freed
    std::size_t born;    // index of a freed block's allocation
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<void*, std::size_t> born_;
  std::vector<std::size_t> left_out_;
};

/// Logs the allocations of a scope, and passes them on to an enclosing ledger.
class [[nodiscard]] AllocationScope {
 public:
  /// `impossible` is the error message inside LibTorch's profiler.
  explicit AllocationScope(const char* impossible =
                               "CheckpointedSequential: must not plan inside LibTorch's profiler, which uses the same "
                               "slot; run one forward pass before it starts");
  AllocationLog& operator*() const { return *log_; }
  AllocationLog* operator->() const { return log_.get(); }

 private:
  std::shared_ptr<AllocationLog> log_;
  c10::DebugInfoGuard guard_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/allocation_log.ipp>
#endif
