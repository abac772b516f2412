// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "byte_pairs.hpp"

namespace bloom {

/// Caches the ids of pieces, because most words of a text repeat. A new piece replaces the old one in its slot, which
/// limits the memory to a few megabytes.
class PieceCache {
 public:
  static constexpr std::size_t longest_piece = 64;  // longer pieces rarely repeat

  /// Returns the ids of a piece; if they are not cached, `encode(piece, ids)` appends them to `ids`. The reference is
  /// valid until the next call. `owner`, at least 1, identifies the tokenizer.
  template <class Encode>
  const std::vector<TokenId>& ids_of(std::uint64_t owner, std::string_view piece, const Encode& encode) {
    auto& slot = slots_[std::hash<std::string_view>()(piece) % slots_.size()];
    if (slot.owner != owner || slot.piece != piece) {
      slot.owner = 0;  // marks the slot invalid if `encode` throws
      slot.ids.clear();
      encode(piece, slot.ids);
      slot.piece = piece;
      slot.owner = owner;
    }
    return slot.ids;
  }

 private:
  struct Slot {
    std::uint64_t owner = 0;
    std::string piece;
    std::vector<TokenId> ids;
  };
  std::vector<Slot> slots_ = std::vector<Slot>(std::size_t{1} << 15);
};

}  // namespace bloom
