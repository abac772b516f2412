// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The sizes of blocks of memory, by address: a hash table with open addressing, for a look-up at every allocation.
/// (`std::unordered_map` allocates a node for each; that made an allocation dearer by half.)
class BlockTable {
 public:
  /// Notes a block's size, > 0; 0 forgets the block. Gives what was noted of it before, or 0.
  std::int64_t exchange(const void* block, std::int64_t bytes) {
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

 private:
  struct Slot {
    const void* block = nullptr;
    std::int64_t bytes = 0;
  };

  std::size_t home(const void* block) const {  // the upper bits of a product depend on all bits of its factors
    return static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(block) * 0x9E3779B97F4A7C15u) >> shift_);
  }
  std::size_t next(std::size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

  /// Where the block is, or would be.
  std::size_t find(const void* block) const {
    auto slot = home(block);
    while (slots_[slot].block && slots_[slot].block != block) slot = next(slot);
    return slot;
  }

  /// Those behind the gap move up, unless that would put them before their home.
  void erase(std::size_t gap) {
    --count_;
    for (auto slot = next(gap); slots_[slot].block; slot = next(slot)) {
      const auto from_home = (slot - home(slots_[slot].block)) & (slots_.size() - 1);
      const auto from_gap = (slot - gap) & (slots_.size() - 1);
      if (from_home >= from_gap) slots_[std::exchange(gap, slot)] = slots_[slot];
    }
    slots_[gap] = {};
  }

  void grow() {
    const auto old = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
    --shift_;
    for (auto& slot : old)
      if (slot.block) slots_[find(slot.block)] = slot;
  }

  int shift_ = 64 - 10;
  std::vector<Slot> slots_ = std::vector<Slot>(1 << 10);
  std::size_t count_ = 0;
};

}  // namespace gradaccum::detail
