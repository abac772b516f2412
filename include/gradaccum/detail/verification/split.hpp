// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/rows.hpp>
#include <gradaccum/loss.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace gradaccum::detail {

/// A batch and its micro-batches, independent of their types.
struct SplitBatch {
  static constexpr std::int64_t whole = -1;

  std::function<std::size_t(std::int64_t steps)> split;  ///< returns the number of parts
  std::function<std::int64_t(std::size_t part)> rows;
  std::function<Loss(std::int64_t part)> loss;  ///< loss of a micro-batch, or of the whole batch
};

std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps);

/// Splits rows as evenly as possible: the first parts have one more.
struct SplitRows {
  template <has_rows B>
  std::vector<B> operator()(const B& batch, std::int64_t steps) const {
    std::vector<B> parts;
    std::int64_t from = 0;
    for (auto count : rows_of_parts(rows_of(batch), steps)) {
      parts.push_back(narrowed(batch, from, count));
      from += count;
    }
    return parts;
  }
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/split.ipp>
#endif
