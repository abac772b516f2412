// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace gradaccum::detail {

/// A range of the address space.
struct AddressRange {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};

/// Unused ranges of the address space. Adjacent ranges are merged.
class FreeRanges {
 public:
  void add(AddressRange range) {
    bytes_ += range.bytes;
    auto after = by_address_.lower_bound(range.address);
    if (after != by_address_.end() && after->first == range.address + range.bytes) {
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

  /// Takes `bytes` from the smallest range that is large enough. There are at most some hundreds of ranges, so that the
  /// search takes less time than filling the block.
  std::optional<AddressRange> take(std::size_t bytes) {
    auto best = by_address_.end();
    for (auto range = by_address_.begin(); range != by_address_.end(); ++range)
      if (range->second >= bytes && (best == by_address_.end() || range->second < best->second)) best = range;
    if (best == by_address_.end()) return std::nullopt;
    const AddressRange taken{best->first, bytes};
    if (best->second > bytes) by_address_.emplace(taken.address + bytes, best->second - bytes);
    by_address_.erase(best);
    bytes_ -= bytes;
    return taken;
  }
  /// Takes the end of the largest range, at most `most` bytes. Empty if there is no range.
  AddressRange take_from_largest(std::size_t most) {
    const auto largest = std::ranges::max_element(by_address_, {}, [](auto& range) { return range.second; });
    if (largest == by_address_.end()) return {};
    const auto bytes = std::min(largest->second, most);
    largest->second -= bytes;
    bytes_ -= bytes;
    const AddressRange taken{largest->first + largest->second, bytes};
    if (largest->second == 0) by_address_.erase(largest);
    return taken;
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::uintptr_t, std::size_t> by_address_;
  std::size_t bytes_ = 0;
};

/// An allocator of large blocks, in whole pages. Freed pages are kept for the next block, up to a total of 1.1 times
/// the peak of used bytes; pages beyond that are returned to the kernel. So gaps between blocks take no memory, in any
/// order of allocations. Thread-safe.
class PageAllocator {
 public:
  PageAllocator() = default;
  PageAllocator(const PageAllocator&) = delete;
  /// Unmaps all memory. No block may be in use.
  ~PageAllocator();

  /// Returns nullptr if memory is short, or on other systems than Linux.
  void* allocate(std::size_t bytes);
  bool has(const void* block) const {
    const std::lock_guard lock(mutex_);
    return blocks_.contains(block);
  }
  /// Frees a block of this allocator.
  void free(void* block);
  /// Returns all kept pages to the kernel, and later those of each freed block.
  void stop_keeping();

  /// Returns the bytes of blocks; `resident_bytes()` includes kept pages.
  std::size_t used_bytes() const {
    const std::lock_guard lock(mutex_);
    return used_;
  }
  std::size_t resident_bytes() const {
    const std::lock_guard lock(mutex_);
    return used_ + warm_.bytes();
  }

 private:
  void make_room(std::size_t bytes);
  void discard(std::size_t most);
  bool map_more(std::size_t bytes);

  mutable std::mutex mutex_;
  std::unordered_map<const void*, std::size_t> blocks_;
  FreeRanges warm_, cold_;  // free ranges with pages in memory, and without
  std::size_t used_ = 0, most_used_ = 0;
  bool keeps_ = true;
};

/// Allocates a block for a CPU tensor, which keeps `pages` alive until it is freed, and reports both to LibTorch's
/// profiler. Returns null if `pages` have none.
c10::DataPtr allocate_from(const std::shared_ptr<PageAllocator>& pages, std::size_t bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/page_allocator.ipp>
#endif
