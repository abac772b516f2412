// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Notes each allocation of a scope, so that one can say afterwards which of them count.
class AllocationLog final : public MemoryLedger {
 public:
  using MemoryLedger::MemoryLedger;

  void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    MemoryLedger::reportMemoryUsage(block, bytes, allocated, reserved, device);
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      born_[block] = entries_.size();
      entries_.push_back({bytes, 0});
    } else if (const auto born = born_.find(block); born != born_.end()) {  // others are older than the scope
      entries_.push_back({-entries_[born->second].bytes, born->second});
      born_.erase(born);
    }
  }

  /// A place in the log.
  std::size_t now() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

  /// The memory of a tensor that is there now does not count, from its allocation on.
  void leave_out(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_sparse()) {
      leave_out(tensor._indices());
      return leave_out(tensor._values());
    }
    const std::lock_guard lock(mutex_);
    const auto born = born_.find(tensor.storage().mutable_data());
    if (born != born_.end()) left_out_.push_back(born->second);
  }

  struct Bytes {
    std::int64_t live = 0, peak = 0;
  };
  /// What is live at `to`, and the most since `from`.
  Bytes between(std::size_t from, std::size_t to) const {
    const std::lock_guard lock(mutex_);
    Bytes bytes;
    for (std::size_t i = 0; i < to; ++i) {
      const auto& entry = entries_[i];
      if (std::ranges::find(left_out_, entry.bytes > 0 ? i : entry.born) == left_out_.end()) bytes.live += entry.bytes;
      bytes.peak = i < from ? bytes.live : std::max(bytes.peak, bytes.live);
    }
    return bytes;
  }

 private:
  struct Entry {
    std::int64_t bytes;  // negative: freed
    std::size_t born;    // then: which entry this was
  };

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<void*, std::size_t> born_;
  std::vector<std::size_t> left_out_;
};

/// A log of the allocations of a scope, within whatever meter is around it.
class [[nodiscard]] AllocationScope {
 public:
  AllocationScope()
      : log_(std::make_shared<AllocationLog>(surrounding())), guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}
  AllocationLog& operator*() const { return *log_; }
  AllocationLog* operator->() const { return log_.get(); }

 private:
  static std::shared_ptr<MemoryLedger> surrounding() {
    auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
    auto* const ledger = dynamic_cast<MemoryLedger*>(installed);
    TORCH_CHECK(!installed || ledger,
                "CheckpointedSequential: must not plan inside LibTorch's profiler, which uses the same slot; run one "
                "forward pass before it starts");
    return ledger ? ledger->shared_from_this() : nullptr;
  }

  std::shared_ptr<AllocationLog> log_;
  c10::DebugInfoGuard guard_;
};

}  // namespace gradaccum::detail
