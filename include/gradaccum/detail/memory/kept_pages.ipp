// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/kept_pages.hpp>

#include <gradaccum/detail/build/inline.hpp>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <iterator>
#include <limits>

namespace gradaccum::detail {

GRADACCUM_INLINE void FreeRanges::add(AddressRange range) {
  bytes_ += range.bytes;
  auto after = by_address_.lower_bound(range.address);
  if (after != by_address_.end() && after->first == range.end()) {
    range.bytes += after->second;
    after = by_address_.erase(after);
  }
  if (after != by_address_.begin())
    if (const auto before = std::prev(after); before->first + before->second == range.address) {
      before->second += range.bytes;
      return;
    }
  by_address_.emplace(range.address, range.bytes);
}

/// Searches all ranges, some hundreds at most: filling a block takes longer.
GRADACCUM_INLINE std::optional<AddressRange> FreeRanges::take(std::size_t bytes) {
  auto best = by_address_.end();
  for (auto range = by_address_.begin(); range != by_address_.end(); ++range)
    if (range->second >= bytes && (best == by_address_.end() || range->second < best->second)) best = range;
  if (best == by_address_.end()) return std::nullopt;
  const AddressRange taken{best->first, bytes};
  if (best->second > bytes) by_address_.emplace(taken.end(), best->second - bytes);
  by_address_.erase(best);
  bytes_ -= bytes;
  return taken;
}

GRADACCUM_INLINE AddressRange FreeRanges::take_from_largest(std::size_t most) {
  const auto largest = std::ranges::max_element(by_address_, {}, [](auto& range) { return range.second; });
  if (largest == by_address_.end()) return {};
  const auto bytes = std::min(largest->second, most);
  largest->second -= bytes;
  bytes_ -= bytes;
  const AddressRange taken{largest->first + largest->second, bytes};
  if (largest->second == 0) by_address_.erase(largest);
  return taken;
}

inline constexpr std::size_t page_bytes = std::size_t{1} << 16;  // a multiple of the page size of any system

GRADACCUM_INLINE std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

GRADACCUM_INLINE std::size_t KeptPages::most_resident(std::size_t used) const {
  constexpr std::size_t always = std::size_t{16} << 20;
  const auto most = std::max(used, most_used_);
  return most + most / 10 + always;
}

/// Gives warm pages back before so many cold bytes are used.
GRADACCUM_INLINE void KeptPages::make_room(std::size_t bytes) {
  const auto most = most_resident(used_ + bytes);
  while (warm_.bytes() > 0 && used_ + warm_.bytes() + bytes > most) {
    const auto range = warm_.take_from_largest(rounded_up(used_ + warm_.bytes() + bytes - most, page_bytes));
#ifdef __linux__
    ::madvise(reinterpret_cast<void*>(range.address), range.bytes, MADV_DONTNEED);
#endif
    cold_.add(range);
  }
}

GRADACCUM_INLINE bool KeptPages::map_more(std::size_t bytes) {
#ifdef __linux__
  constexpr std::size_t at_once = std::size_t{256} << 20;
  for (const auto size : {std::max(bytes, at_once), bytes}) {
    void* const address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) continue;
    cold_.add({reinterpret_cast<std::uintptr_t>(address), size});
    return true;
  }
#endif
  return false;
}

GRADACCUM_INLINE void* KeptPages::allocate(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) return nullptr;  // rounding up could overflow
  bytes = rounded_up(bytes, page_bytes);
  const std::lock_guard lock(mutex_);
  auto range = warm_.take(bytes);
  if (!range) {
    make_room(bytes);
    range = cold_.take(bytes);
    if (!range && map_more(bytes)) range = cold_.take(bytes);
  }
  if (!range) return nullptr;
  blocks_.emplace(range->address, bytes);
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  return reinterpret_cast<void*>(range->address);
}

GRADACCUM_INLINE bool KeptPages::has(const void* block) const {
  const std::lock_guard lock(mutex_);
  return blocks_.contains(reinterpret_cast<std::uintptr_t>(block));
}

GRADACCUM_INLINE void KeptPages::free(void* block) {
  const std::lock_guard lock(mutex_);
  const auto node = blocks_.extract(reinterpret_cast<std::uintptr_t>(block));
  used_ -= node.mapped();
  warm_.add({node.key(), node.mapped()});
}

GRADACCUM_INLINE std::size_t KeptPages::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

GRADACCUM_INLINE std::size_t KeptPages::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_ + warm_.bytes();
}

}  // namespace gradaccum::detail
