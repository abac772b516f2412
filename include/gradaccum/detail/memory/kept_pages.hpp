// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/free_ranges.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace gradaccum::detail {

/// Large blocks of memory, in whole pages. What is freed is kept for the next block, warm, but never so much that all
/// together is more than a tenth above the most that blocks have ever had at once: then the kernel gets pages back.
/// Gaps between blocks cost no memory, then, in whatever order these come and go.
///
/// Thread safe.
class KeptPages {
 public:
  /// nullptr where there is no memory, or this is no Linux.
  void* allocate(std::size_t bytes);
  bool has(const void* block) const;
  /// One that it has.
  void free(void* block);

  /// Of blocks, and with those what is kept for others.
  std::size_t used_bytes() const;
  std::size_t resident_bytes() const;

 private:
  std::size_t most_resident(std::size_t used) const;
  void make_room(std::size_t bytes);
  bool map_more(std::size_t bytes);

  mutable std::mutex mutex_;
  std::unordered_map<std::uintptr_t, std::size_t> blocks_;
  FreeRanges warm_, cold_;  // whose pages the process has, and has not
  std::size_t used_ = 0, most_used_ = 0;
  std::atomic<std::uintptr_t> begin_ = UINTPTR_MAX, end_ = 0;  // no block is outside of these
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/kept_pages.ipp>
#endif
