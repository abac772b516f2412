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

/// A piece of the address space.
struct AddressRange {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;

  std::uintptr_t end() const { return address + bytes; }
};

/// Pieces of the address space that nobody uses. Neighbours become one.
class FreeRanges {
 public:
  void add(AddressRange range);

  /// Takes so many bytes from the smallest piece that has them.
  std::optional<AddressRange> take(std::size_t bytes);
  /// Takes what the largest piece has, but so many bytes at most: its end. Empty if there is none.
  AddressRange take_from_largest(std::size_t most);

  std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::uintptr_t, std::size_t> by_address_;
  std::size_t bytes_ = 0;
};

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
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/kept_pages.ipp>
#endif
