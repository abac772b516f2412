// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

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
  using BySize = std::set<std::pair<std::size_t, std::uintptr_t>>;

  void insert(AddressRange range);
  AddressRange remove(std::uintptr_t address);

  std::map<std::uintptr_t, std::size_t> by_address_;
  BySize by_size_;
  std::size_t bytes_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/free_ranges.ipp>
#endif
