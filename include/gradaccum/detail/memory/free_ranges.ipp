// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/free_ranges.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <iterator>

namespace gradaccum::detail {

GRADACCUM_INLINE void FreeRanges::insert(AddressRange range) {
  if (range.bytes == 0) return;
  by_address_.emplace(range.address, range.bytes);
  by_size_.emplace(range.bytes, range.address);
  bytes_ += range.bytes;
}

GRADACCUM_INLINE AddressRange FreeRanges::remove(std::uintptr_t address) {
  const auto node = by_address_.extract(address);
  by_size_.erase({node.mapped(), address});
  bytes_ -= node.mapped();
  return {address, node.mapped()};
}

GRADACCUM_INLINE void FreeRanges::add(AddressRange range) {
  const auto after = by_address_.lower_bound(range.address);
  if (after != by_address_.end() && after->first == range.end()) range.bytes += remove(after->first).bytes;
  const auto next = by_address_.lower_bound(range.address);
  if (next != by_address_.begin())
    if (const auto before = std::prev(next); before->first + before->second == range.address) {
      const auto found = remove(before->first);
      range = {found.address, found.bytes + range.bytes};
    }
  insert(range);
}

GRADACCUM_INLINE std::optional<AddressRange> FreeRanges::take(std::size_t bytes) {
  const auto found = by_size_.lower_bound({bytes, 0});
  if (found == by_size_.end()) return std::nullopt;
  const auto all = remove(found->second);
  insert({all.address + bytes, all.bytes - bytes});
  return AddressRange{all.address, bytes};
}

GRADACCUM_INLINE AddressRange FreeRanges::take_from_largest(std::size_t most) {
  if (by_size_.empty()) return {};
  const auto all = remove(by_size_.rbegin()->second);
  const auto taken = std::min(all.bytes, most);
  insert({all.address, all.bytes - taken});
  return {all.end() - taken, taken};
}

}  // namespace gradaccum::detail
