// SPDX-License-Identifier: Apache-2.0

#include "data/split.hpp"

#include "data/random.hpp"
#include "data/reviews.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

using namespace bloom;

namespace {

/// Makes rows that are identified by their labels.
std::vector<Review> numbered(std::int64_t count) {
  std::vector<Review> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back({"review " + std::to_string(i), i});
  return rows;
}

std::vector<std::int64_t> labels_of(const std::vector<Review>& rows) {
  std::vector<std::int64_t> labels;
  for (const auto& row : rows) labels.push_back(row.label);
  return labels;
}

/// Returns the labels of all parts, one part after another.
std::vector<std::int64_t> order_of(const Split& parts) {
  auto labels = labels_of(parts.train);
  for (const auto* part : {&parts.validation, &parts.test})
    for (const auto label : labels_of(*part)) labels.push_back(label);
  return labels;
}

const std::int64_t largest = std::numeric_limits<std::int64_t>::max();

}  // namespace

TEST_CASE("Split: a seed determines the order") {
  // The expected order was computed by another program.
  REQUIRE(order_of(split(numbered(20), 123)) ==
          std::vector<std::int64_t>{13, 7, 0, 19, 2, 17, 10, 6, 11, 9, 3, 5, 16, 15, 8, 18, 14, 1, 12, 4});
  REQUIRE(order_of(split(numbered(20), 124)) ==
          std::vector<std::int64_t>{15, 1, 19, 17, 9, 10, 3, 7, 6, 2, 0, 13, 4, 16, 5, 14, 18, 11, 8, 12});
}

TEST_CASE("Split: every row is in one part, 70, 10 and 20 % of them") {
  for (const auto& [count, train, validation, test] : std::vector<std::array<std::size_t, 4>>{
           {50'000, 35'000, 5'000, 10'000}, {10, 7, 1, 2}, {11, 8, 1, 2}, {19, 15, 1, 3}, {1234, 865, 123, 246}}) {
    const auto rows = numbered(static_cast<std::int64_t>(count));
    const auto parts = split(rows, count);
    REQUIRE(parts.train.size() == train);
    REQUIRE(parts.validation.size() == validation);
    REQUIRE(parts.test.size() == test);
    auto order = order_of(parts);
    REQUIRE(order != labels_of(rows));
    std::sort(order.begin(), order.end());
    REQUIRE(order == labels_of(rows));
    for (const auto* part : {&parts.train, &parts.validation, &parts.test})
      for (const auto& row : *part) REQUIRE(row.text == "review " + std::to_string(row.label));
  }
}

TEST_CASE("Split: too few rows") {
  REQUIRE_ERROR("split: there must be at least 10 rows to train, validate and test, got 9", split(numbered(9), 1));
  REQUIRE_ERROR("got 0", split({}, 1));
}

TEST_CASE("Random: numbers below an end are equally likely, and the same everywhere") {
  Random random(5);  // half of the draws are rejected; computed by another program
  for (const std::uint64_t expected : {52533, 269089, 723880, 617911, 757934, 110693})
    REQUIRE(random.below((std::uint64_t{1} << 63) + 1) % 1'000'000 == expected);
  std::array<int, 7> counts{};
  for (int i = 0; i < 70'000; ++i) ++counts[random.below(7)];
  for (const auto count : counts) REQUIRE(std::abs(count - 10'000) < 400);  // 4.3 standard deviations
  for (int i = 0; i < 100; ++i) REQUIRE(random.below(1) == 0);
  for (int i = 0; i < 100; ++i) REQUIRE_FALSE(random.percent(0));
  for (int i = 0; i < 100; ++i) REQUIRE(random.percent(100));
}

TEST_CASE("Labels: counted, and each from 0 to the largest must occur") {
  REQUIRE(count_labels({{"a", 1}, {"b", 0}, {"c", 1}}, "file") == 2);
  REQUIRE(count_labels(numbered(10), "file") == 10);
  REQUIRE_ERROR("file: each label from 0 to the largest must occur, got 2, but no 1",
                count_labels({{"a", 0}, {"b", 2}, {"c", 0}}, "file"));
  REQUIRE_ERROR("got 1, but no 0", count_labels({{"a", 1}, {"b", 2}, {"c", 1}}, "file"));
  REQUIRE_ERROR("got 9223372036854775807, but no 1", count_labels({{"a", 0}, {"b", largest}}, "file"));
  REQUIRE_ERROR("file: there must be at least two labels, got 1", count_labels({{"a", 0}, {"b", 0}}, "file"));
  REQUIRE_ERROR("got 0", count_labels({}, "file"));
  REQUIRE_ERROR("file: labels must not be negative, got -1", count_labels({{"a", 0}, {"b", -1}}, "file"));
}

TEST_CASE("Labels: labels of other files must be known ones") {
  REQUIRE_NOTHROW(check_labels({{"a", 0}, {"b", 0}}, 2, "file"));
  REQUIRE_ERROR("file: labels must be 0 to 1, got 2 for 'b'", check_labels({{"a", 0}, {"b", 2}}, 2, "file"));
  REQUIRE_ERROR("labels must be 0 to 1, got -1", check_labels({{"b", -1}}, 2, "file"));
}
