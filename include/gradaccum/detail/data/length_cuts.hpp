// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Cuts an order of sequences into batches of about one length.
class LengthCuts {
 public:
  using Rows = std::vector<std::int64_t>;

  /// One of `batch_size` and `tokens` is 0. `mega_batch`: batches that are sorted together; 0: all of them. Of a
  /// short list a quarter, but no less than 4: the batches of two epochs are not to be the same.
  LengthCuts(const std::vector<std::int64_t>& lengths, std::int64_t batch_size, std::int64_t tokens,
             std::int64_t mega_batch)
      : lengths_(lengths), by_tokens_(tokens > 0), room_(std::max(batch_size, tokens)) {
    std::int64_t all = 0;
    for (std::size_t row = 0; row < lengths.size(); ++row) all += weight(static_cast<std::int64_t>(row));
    const auto together = std::min(mega_batch, std::max<std::int64_t>(all / room_ / 4, 4));
    mega_room_ = mega_batch == 0 || all / room_ < together ? all : room_ * together;
  }

  /// The longest first in each batch. Cut by size, only the last one is smaller.
  std::vector<Rows> operator()(Rows order) const {
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

 private:
  std::int64_t length(std::int64_t row) const { return lengths_[static_cast<std::size_t>(row)]; }
  std::int64_t weight(std::int64_t row) const { return by_tokens_ ? length(row) : 1; }

  const std::vector<std::int64_t>& lengths_;
  bool by_tokens_;
  std::int64_t room_, mega_room_;  // of a batch, of a mega-batch: in sequences, or in their elements
};

}  // namespace gradaccum::detail
