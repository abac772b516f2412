// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

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
    if (bytes > 0) {
      const auto [held, is_new] = held_.try_emplace(block, bytes);
      if (!is_new) add(device, -std::exchange(held->second, bytes));  // it was freed unseen, and given out again
      add(device, bytes);
    } else if (const auto held = held_.find(block); held != held_.end()) {
      add(device, -held->second);
      held_.erase(held);
    }
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
  std::pmr::unsynchronized_pool_resource pool_;  // an allocation is to cost little more than it does unmeasured
  std::pmr::unordered_map<void*, std::int64_t> held_{&pool_};
  Account total_;
  std::vector<std::pair<c10::Device, Account>> by_device_;  // few: faster than a map
};

}  // namespace gradaccum::detail
