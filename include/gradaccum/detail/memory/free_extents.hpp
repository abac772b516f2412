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
struct Extent {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;

  std::uintptr_t end() const { return address + bytes; }
};

/// Pieces of the address space that nobody uses. Neighbours become one.
class FreeExtents {
 public:
  void add(Extent extent);

  /// Takes so many bytes from the smallest piece that has them.
  std::optional<Extent> take(std::size_t bytes);
  /// Takes what the largest piece has, but so many bytes at most: its end. Empty if there is none.
  Extent take_from_largest(std::size_t most);

  std::size_t bytes() const { return bytes_; }

 private:
  using BySize = std::set<std::pair<std::size_t, std::uintptr_t>>;

  void insert(Extent extent);
  Extent remove(std::uintptr_t address);

  std::map<std::uintptr_t, std::size_t> by_address_;
  BySize by_size_;
  std::size_t bytes_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/free_extents.ipp>
#endif
