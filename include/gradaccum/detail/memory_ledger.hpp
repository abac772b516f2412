// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace gradaccum::detail {

/// Receives each allocation that LibTorch reports, from any thread, and passes it on to the ledger around it.
///
/// It knows its blocks by address: LibTorch reports frees of older blocks too, on the CPU sometimes with a stale size.
class MemoryLedger final : public c10::MemoryReportingInfoBase, public std::enable_shared_from_this<MemoryLedger> {
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
    if (const auto known = held_.find(block); known != held_.end()) {  // freed; or freed unseen, and given out again
      add(device, -known->second);
      held_.erase(known);
    }
    if (bytes <= 0) return;
    held_.emplace(block, bytes);
    add(device, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }

  Account total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  Account of(c10::Device device) const {
    const std::lock_guard lock(mutex_);
    const auto found = by_device_.find(device);
    return found == by_device_.end() ? Account() : found->second;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    total_.peak = total_.live;
    for (auto& [device, account] : by_device_) account.peak = account.live;
  }

 private:
  void add(c10::Device device, std::int64_t bytes) {
    total_.add(bytes);
    by_device_[device].add(bytes);
  }

  std::shared_ptr<MemoryLedger> surrounding_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> held_;
  Account total_;
  std::unordered_map<c10::Device, Account> by_device_;
};

}  // namespace gradaccum::detail
