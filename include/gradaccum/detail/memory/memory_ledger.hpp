// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/block_table.hpp>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Receives each allocation that LibTorch reports, from any thread, and passes it on to the ledger around it.
///
/// It knows its blocks by address: LibTorch reports frees of older blocks too, on the CPU sometimes with a stale size.
class MemoryLedger : public c10::MemoryReportingInfoBase, public std::enable_shared_from_this<MemoryLedger> {
 public:
  struct Account {
    std::int64_t live = 0, peak = 0;
    void add(std::int64_t bytes) { peak = std::max(peak, live += bytes); }
  };

  explicit MemoryLedger(std::shared_ptr<MemoryLedger> surrounding) : surrounding_(std::move(surrounding)) {}

  void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated, std::size_t reserved,
                         c10::Device device) override {
    if (surrounding_) surrounding_->reportMemoryUsage(block, bytes, allocated, reserved, device);
    const std::lock_guard lock(mutex_);
    // What was noted of a block that is given out is of one that was freed unseen.
    add(device, -held_.exchange(block, std::max<std::int64_t>(bytes, 0)));
    if (bytes > 0) add(device, bytes);
  }
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
  void add(c10::Device device, std::int64_t bytes) {
    total_.add(bytes);
    account_of(device).add(bytes);
  }
  Account& account_of(c10::Device device) {
    for (auto& [known, account] : by_device_)
      if (known == device) return account;
    return by_device_.emplace_back(device, Account()).second;
  }

  std::shared_ptr<MemoryLedger> surrounding_;
  mutable std::mutex mutex_;
  BlockTable held_;
  Account total_;
  std::vector<std::pair<c10::Device, Account>> by_device_;  // few: faster than a map
};

}  // namespace gradaccum::detail
