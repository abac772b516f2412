// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t BlockTable::exchange(const void* block, std::int64_t bytes) {
  auto slot = find(block);
  if (slots_[slot].block) {
    const auto before = std::exchange(slots_[slot].bytes, bytes);
    if (bytes == 0) erase(slot);
    return before;
  }
  if (bytes == 0) return 0;
  slots_[slot] = {block, bytes};
  if (++count_ * 2 > slots_.size()) grow();
  return 0;
}

/// Takes the upper bits of a product, which depend on all bits of its factors.
GRADACCUM_INLINE std::size_t BlockTable::home(const void* block) const {
  return static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(block) * 0x9E3779B97F4A7C15u) >> shift_);
}

/// Finds the slot that the block has, or would get.
GRADACCUM_INLINE std::size_t BlockTable::find(const void* block) const {
  auto slot = home(block);
  while (slots_[slot].block && slots_[slot].block != block) slot = next(slot);
  return slot;
}

/// Moves the blocks behind the gap up, unless that would put them before their home.
GRADACCUM_INLINE void BlockTable::erase(std::size_t gap) {
  --count_;
  for (auto slot = next(gap); slots_[slot].block; slot = next(slot)) {
    const auto from_home = (slot - home(slots_[slot].block)) & (slots_.size() - 1);
    const auto from_gap = (slot - gap) & (slots_.size() - 1);
    if (from_home >= from_gap) slots_[std::exchange(gap, slot)] = slots_[slot];
  }
  slots_[gap] = {};
}

GRADACCUM_INLINE void BlockTable::grow() {
  const auto old = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
  --shift_;
  for (auto& slot : old)
    if (slot.block) slots_[find(slot.block)] = slot;
}

GRADACCUM_INLINE void MemoryLedger::Account::add(std::int64_t bytes) { peak = std::max(peak, live += bytes); }

GRADACCUM_INLINE bool MemoryLedger::possible() {
  auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return !installed || dynamic_cast<MemoryLedger*>(installed);
}

GRADACCUM_INLINE std::shared_ptr<MemoryLedger> MemoryLedger::innermost(const char* impossible) {
  TORCH_CHECK(possible(), impossible);
  auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return installed ? dynamic_cast<MemoryLedger&>(*installed).shared_from_this() : nullptr;
}

GRADACCUM_INLINE void MemoryLedger::reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated,
                                                      std::size_t reserved, c10::Device device) {
  if (surrounding_) surrounding_->reportMemoryUsage(block, bytes, allocated, reserved, device);
  const std::lock_guard lock(mutex_);
  // An entry for a block that is allocated now belongs to one whose free was not reported.
  add(device, -held_.exchange(block, std::max<std::int64_t>(bytes, 0)));
  if (bytes > 0) add(device, bytes);
}

GRADACCUM_INLINE MemoryLedger::Account MemoryLedger::total() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

GRADACCUM_INLINE MemoryLedger::Account MemoryLedger::of(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  for (auto& [known, account] : by_device_)
    if (known == device) return account;
  return {};
}

GRADACCUM_INLINE void MemoryLedger::reset_peak() {
  const std::lock_guard lock(mutex_);
  total_.peak = total_.live;
  for (auto& [device, account] : by_device_) account.peak = account.live;
}

GRADACCUM_INLINE void MemoryLedger::add(c10::Device device, std::int64_t bytes) {
  total_.add(bytes);
  account_of(device).add(bytes);
}

GRADACCUM_INLINE MemoryLedger::Account& MemoryLedger::account_of(c10::Device device) {
  for (auto& [known, account] : by_device_)
    if (known == device) return account;
  return by_device_.emplace_back(device, Account()).second;
}

}  // namespace gradaccum::detail
