// SPDX-License-Identifier: Apache-2.0
#pragma once

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
             std::int64_t mega_batch);

  /// The longest first in each batch. Cut by size, only the last one is smaller.
  std::vector<Rows> operator()(Rows order) const;

 private:
  std::int64_t length(std::int64_t row) const { return lengths_[static_cast<std::size_t>(row)]; }
  std::int64_t weight(std::int64_t row) const { return by_tokens_ ? length(row) : 1; }

  const std::vector<std::int64_t>& lengths_;
  bool by_tokens_;
  std::int64_t room_, mega_room_;  // of a batch, of a mega-batch: in sequences, or in their elements
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/length_cuts.ipp>
#endif
