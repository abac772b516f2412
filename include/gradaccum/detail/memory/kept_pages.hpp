// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace gradaccum::detail {

/// A range of the address space.
struct AddressRange {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;

  std::uintptr_t end() const { return address + bytes; }
};

/// Unused ranges of the address space. Neighbours are merged.
class FreeRanges {
 public:
  void add(AddressRange range);

  /// Takes `bytes` from the smallest range that has them.
  std::optional<AddressRange> take(std::size_t bytes);
  /// Takes the end of the largest range, at most `most` bytes. Empty if there is no range.
  AddressRange take_from_largest(std::size_t most);

  std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::uintptr_t, std::size_t> by_address_;
  std::size_t bytes_ = 0;
};

/// An allocator of large blocks, in whole pages. Freed memory is kept, warm, for the next block, up to a total of a
/// tenth above the most that blocks have ever used at once; beyond that the kernel gets pages back. So gaps between
/// blocks cost no memory, whatever the order of allocations.
///
/// Thread safe.
class KeptPages {
 public:
  /// Returns nullptr if memory is short, or on other systems than Linux.
  void* allocate(std::size_t bytes);
  bool has(const void* block) const;
  /// Frees a block of this allocator.
  void free(void* block);

  /// The bytes of blocks; `resident_bytes()` includes those that are kept for later ones.
  std::size_t used_bytes() const;
  std::size_t resident_bytes() const;

 private:
  std::size_t most_resident(std::size_t used) const;
  void make_room(std::size_t bytes);
  bool map_more(std::size_t bytes);

  mutable std::mutex mutex_;
  std::unordered_map<std::uintptr_t, std::size_t> blocks_;
  FreeRanges warm_, cold_;  // with pages in memory, and without
  std::size_t used_ = 0, most_used_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/kept_pages.ipp>
#endif
