// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/length_cuts.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE LengthCuts::LengthCuts(const std::vector<std::int64_t>& lengths, std::int64_t batch_size,
                                        std::int64_t tokens, std::int64_t mega_batch)
    : lengths_(lengths), by_tokens_(tokens > 0), room_(std::max(batch_size, tokens)) {
  std::int64_t all = 0;
  for (std::size_t row = 0; row < lengths.size(); ++row) all += weight(static_cast<std::int64_t>(row));
  const auto together = std::min(mega_batch, std::max<std::int64_t>(all / room_ / 4, 4));
  mega_room_ = mega_batch == 0 || all / room_ < together ? all : room_ * together;
}

GRADACCUM_INLINE std::vector<LengthCuts::Rows> LengthCuts::operator()(Rows order) const {
  std::vector<Rows> batches;
  for (auto from = order.begin(); from != order.end();) {
    auto to = from;
    for (auto left = mega_room_; to != order.end() && weight(*to) <= left; ++to) left -= weight(*to);
    std::stable_sort(from, to, [&](auto a, auto b) { return length(a) > length(b); });
    while (from != to) {
      const auto batch = from;
      from += std::min<std::int64_t>(to - from, room_ / weight(*from));
      batches.emplace_back(batch, from);
    }
  }
  return batches;
}

}  // namespace gradaccum::detail
