// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/allocation_log.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE void AllocationLog::reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated,
                                                       std::size_t reserved, c10::Device device) {
  MemoryLedger::reportMemoryUsage(block, bytes, allocated, reserved, device);
  const std::lock_guard lock(mutex_);
  if (bytes > 0) {
    born_[block] = entries_.size();
    entries_.push_back({bytes, 0});
  } else if (const auto born = born_.find(block); born != born_.end()) {  // other blocks are older than the scope
    entries_.push_back({-entries_[born->second].bytes, born->second});
    born_.erase(born);
  }
}

GRADACCUM_INLINE bool AllocationLog::has(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return born_.contains(const_cast<void*>(tensor.storage().data()));
}

GRADACCUM_INLINE std::size_t AllocationLog::now() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

GRADACCUM_INLINE void AllocationLog::leave_out(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) {
    leave_out(tensor._indices());
    return leave_out(tensor._values());
  }
  const std::lock_guard lock(mutex_);
  const auto born = born_.find(tensor.storage().mutable_data());
  if (born != born_.end()) left_out_.push_back(born->second);
}

GRADACCUM_INLINE AllocationLog::Bytes AllocationLog::between(std::size_t from, std::size_t to) const {
  const std::lock_guard lock(mutex_);
  Bytes bytes;
  for (std::size_t i = 0; i < to; ++i) {
    const auto& entry = entries_[i];
    if (std::ranges::find(left_out_, entry.bytes > 0 ? i : entry.born) == left_out_.end()) bytes.live += entry.bytes;
    bytes.peak = i < from ? bytes.live : std::max(bytes.peak, bytes.live);
  }
  return bytes;
}

GRADACCUM_INLINE AllocationScope::AllocationScope(const char* impossible)
    : log_(std::make_shared<AllocationLog>(MemoryLedger::innermost(impossible))),
      guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}

}  // namespace gradaccum::detail
