// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/fitting/memory_fitter.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace inner = gradaccum::detail;
using inner::RowPlan;

namespace {

/// The memory of rows: the largest of a few sums, as in a network.
struct Memory {
  std::vector<std::pair<std::int64_t, std::int64_t>> sums;  // a + b * rows

  std::int64_t of(std::int64_t rows) const {
    std::int64_t most = 0;
    for (auto [a, b] : sums) most = std::max(most, a + b * rows);
    return most;
  }
};

}  // namespace

TEST_CASE("RowPlan: grows to nine tenths of the bytes and exceeds them by at most a row") {
  std::mt19937_64 random(1);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  for (int i = 0; i < 2000; ++i) {
    Memory memory;
    for (int sum = 0; sum < 3; ++sum) memory.sums.emplace_back(below(1000), 1 + below(50));
    const auto bytes = memory.of(1) + below(30'000);
    RowPlan plan;
    CHECK(plan.rows_for(bytes, 1) == 1);
    std::int64_t rows = 0;
    int failures = 0;
    for (int piece = 0; piece < 80; ++piece) {
      rows = plan.rows_for(bytes, 1);
      const auto taken = memory.of(rows);
      REQUIRE(taken <= bytes + memory.of(1));
      if (taken <= bytes)
        plan.measured({rows, taken}, /*certain=*/true);
      else
        plan.failed({rows, taken}), ++failures;
    }
    REQUIRE(plan.rows_for(bytes, 1) == rows);
    REQUIRE(failures <= 1);
    REQUIRE((memory.of(rows) >= bytes - bytes / 10 || rows < 10 || memory.of(rows + 1) > bytes));
    REQUIRE(plan.bytes_for(rows) == memory.of(rows));
  }
}

TEST_CASE("RowPlan: after running out of memory, fewer rows are tried, and the failed number never again") {
  for (const std::int64_t most : {1, 2, 3, 7, 100, 5000}) {
    RowPlan plan;  // a device without a known limit
    const auto all = std::numeric_limits<std::int64_t>::max() / 4;
    int failures = 0;
    std::int64_t rows = 0, worst = std::numeric_limits<std::int64_t>::max();
    for (int piece = 0; piece < 100; ++piece) {
      rows = plan.rows_for(all, 1);
      if (rows > most) {
        CHECK(rows < worst);
        worst = rows;
        plan.failed({rows, 0});
        ++failures;
      } else {
        plan.measured({rows, 100 * rows}, true);
      }
    }
    CHECK(rows <= most);
    CHECK(rows >= most - most / 20);
    CHECK(failures < 70);
  }
}

TEST_CASE("RowPlan: a number of rows that fails after it fitted is halved") {
  RowPlan plan;
  plan.measured({64, 6400}, true);
  plan.failed({64, 0});
  CHECK(plan.rows_for(10'000, 1) == 32);
  plan.measured({32, 3200}, true);
  CHECK(plan.rows_for(10'000, 1) == 48);
  CHECK(plan.rows_for(3'000, 1) == 28);  // less memory
  plan.measured({28, 2800}, true);
  CHECK(plan.rows_for(3'200, 1) == 30);
  CHECK(plan.rows_for(100, 5) == 5);
  CHECK(plan.rows_for(-100, 5) == 5);
}

TEST_CASE("RowPlan: a first guess is replaced by a measurement") {
  RowPlan plan;
  plan.measured({4, 4000}, /*certain=*/false);
  plan.measured({4, 1000}, /*certain=*/true);
  CHECK(plan.rows_for(2'000, 1) == 8);
  RowPlan smaller;
  smaller.measured(plan.fits(), /*certain=*/false);
  CHECK(smaller.rows_for(1'000, 1) == 4);
  smaller.measured({4, 500}, true);
  CHECK(smaller.rows_for(1'000, 1) == 8);
}

TEST_CASE("kind_of_rows: distinguishes shapes, but not numbers of rows") {
  const auto x = torch::zeros({6, 4, 3}), y = torch::zeros({6}, torch::kLong);
  const auto kind = inner::kind_of_rows(std::pair(x, y));
  CHECK(kind.text == "Float [*, 4, 3], Long [*]");
  CHECK(kind.elements == 13);
  CHECK(inner::kind_of_rows(std::pair(x.narrow(0, 0, 2), y.narrow(0, 0, 2))).form == kind.form);
  CHECK(inner::kind_of_rows(std::pair(x.to(torch::kDouble), y)).form != kind.form);
  CHECK(inner::kind_of_rows(std::pair(x.narrow(1, 0, 2), y)).elements == 7);
  CHECK(inner::kind_of_rows(std::vector<int>{1, 2}).text == "rows");
  CHECK(kind.covers(inner::kind_of_rows(std::pair(x.narrow(1, 0, 2), y))));
  CHECK_FALSE(inner::kind_of_rows(std::pair(x.narrow(1, 0, 2), y)).covers(kind));
  CHECK_FALSE(kind.covers(inner::kind_of_rows(std::pair(x.transpose(1, 2), y))));
}
