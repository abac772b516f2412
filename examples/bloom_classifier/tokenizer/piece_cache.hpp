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

/// Remembers the ids of pieces, since most words of a text were met before. A piece takes its slot from the piece that
/// is there, so that memory is bounded: a few megabytes.
class PieceCache {
 public:
  static constexpr std::size_t longest_piece = 64;  // longer pieces are rarely met again

  /// The ids of a piece, which `encode(piece, ids)` appends to `ids` where they are not known. They are the cache's
  /// until the next call. The owner, at least 1, is whose ids they are.
  template <class Encode>
  const std::vector<TokenId>& ids_of(std::uint64_t owner, std::string_view piece, const Encode& encode) {
    auto& slot = slots_[std::hash<std::string_view>()(piece) % slots_.size()];
    if (slot.owner != owner || slot.piece != piece) {
      slot.owner = 0;  // should what follows throw, the slot is nobody's
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
