// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/random.hpp"
#include "data/reviews.hpp"
#include "data/text_file.hpp"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace bloom {

struct Split {
  std::vector<Review> train, validation, test;
};

/// Shuffles the rows and cuts them: 70 % to train, 10 % to validate, 20 % to test; 35,000, 5,000 and 10,000 of 50,000.
///
///     auto parts = bloom::split(bloom::read_csv("reviews.csv").rows, 123);
///
/// The parts depend only on rows and seed. Each row is in one of them; the remainder goes to train.
inline Split split(std::vector<Review> rows, std::uint64_t seed) {
  constexpr std::size_t min_rows = 10;
  if (rows.size() < min_rows)
    data_error("split", "there must be at least ", min_rows, " rows to train, validate and test, got ", rows.size());
  Random(seed).shuffle(rows);
  auto next = std::make_move_iterator(rows.begin());
  const auto take = [&](std::size_t count) {
    const auto begin = next;
    next += static_cast<std::ptrdiff_t>(count);
    return std::vector<Review>(begin, next);
  };
  const auto validation = rows.size() / 10, test = rows.size() / 5;
  Split parts;
  parts.train = take(rows.size() - validation - test);
  parts.validation = take(validation);
  parts.test = take(test);
  return parts;
}

}  // namespace bloom
