// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/learning_rates.hpp>

#include <limits>

// pytorch_values/schedules.test.cpp compares the values with Python's.

namespace lr = gradaccum::lr;

namespace {

constexpr auto last = std::numeric_limits<std::int64_t>::max();
constexpr double infinity = std::numeric_limits<double>::infinity(),
                 not_a_number = std::numeric_limits<double>::quiet_NaN();

}  // namespace

TEST_CASE("lr: the phases meet at their exact rates") {
  const double peak = 0.1, end = 0.03, start = 0.007;
  const lr::Linear linear{peak, 10, 50, end, start};
  const lr::Cosine cosine{peak, 10, 50, end, start};
  const lr::WarmupStableDecay wsd{peak, 10, 50, 15, end, start};
  const auto check = [&](const auto& rate) {
    CHECK(rate(0) == start);
    CHECK(rate(9) < peak);
    CHECK(rate(10) == peak);
    CHECK(rate(49) > end);
    CHECK(rate(50) == end);
    CHECK(rate(51) == end);
    CHECK(rate(last) == end);
    for (int update = 0; update < 60; ++update) {
      INFO(update);
      if (update < 10) CHECK(rate(update + 1) > rate(update));
      if (update >= 10) CHECK(rate(update + 1) <= rate(update));
    }
  };
  check(linear);
  check(cosine);
  check(wsd);
  CHECK(linear(11) < peak);
  CHECK(wsd(11) == peak);
  CHECK(wsd(35) == peak);  // 50 - 15
  CHECK(wsd(36) < peak);
  CHECK(lr::Constant{peak, 10, start}(0) == start);
  CHECK(lr::Constant{peak, 10, start}(10) == peak);
  CHECK(lr::Constant{peak, 10, start}(last) == peak);
}

TEST_CASE("lr: by default the rate of update 0 is peak / (warmup + 1)") {
  const lr::Constant rate{.peak = 0.5, .warmup = 4};
  for (int update = 0; update < 4; ++update) CHECK(rate(update) == Approx(0.1 * (update + 1)).epsilon(1e-15));
  CHECK(rate(4) == 0.5);
  CHECK(lr::Constant{.peak = 0.5}(0) == 0.5);
  CHECK(lr::Constant{.peak = 0.5, .warmup = 4, .start = 0}(0) == 0);
}

TEST_CASE("lr: the shortest phases") {
  const lr::Linear one_update{.peak = 1, .total = 1};
  CHECK(one_update(0) == 1);
  CHECK(one_update(1) == 0);
  const lr::Cosine all_warmup{.peak = 1, .warmup = 3, .total = 3, .end = 0.25};
  CHECK(all_warmup(2) == 0.75);
  CHECK(all_warmup(3) == 0.25);
  const lr::WarmupStableDecay no_plateau{.peak = 1, .warmup = 2, .total = 4, .decay = 2, .shape = lr::Decay::linear};
  CHECK(no_plateau(2) == 1);
  CHECK(no_plateau(3) == 0.5);
}

TEST_CASE("lr: the longest phases lose nothing") {
  constexpr auto total = std::int64_t{1} << 53;
  const lr::Linear linear{.peak = 1, .total = total};
  CHECK(linear(1) == 1 - 0x1p-53);
  CHECK(linear(total / 2) == 0.5);
  CHECK(linear(total - 1) == 0x1p-53);
  CHECK(linear(total) == 0);
}

TEST_CASE("lr: a rate depends only on its update") {
  const lr::WarmupStableDecay rate{.peak = 0.3, .warmup = 7, .total = 40, .decay = 9};
  std::vector<double> forwards, backwards(45);
  for (int update = 0; update < 45; ++update) forwards.push_back(rate(update));
  for (int update = 44; update >= 0; --update) backwards[update] = rate(update);
  CHECK(forwards == backwards);
}

TEST_CASE("lr: before its decay WarmupStableDecay does not depend on the total") {
  const lr::WarmupStableDecay shorter{.peak = 0.3, .warmup = 7, .total = 40, .decay = 9};
  const lr::WarmupStableDecay longer{.peak = 0.3, .warmup = 7, .total = 400, .decay = 90};
  for (int update = 0; update <= 31; ++update) CHECK(shorter(update) == longer(update));
  CHECK(shorter(32) != longer(32));
}

TEST_CASE("lr: members out of range, and missing ones") {
  REQUIRE_ERROR("lr::Constant: peak must be finite and > 0, got 0", lr::Constant{}(0));
  REQUIRE_ERROR("peak must be finite and > 0, got nan", lr::Constant{.peak = not_a_number}(0));
  REQUIRE_ERROR("peak must be finite and > 0, got inf", lr::Constant{.peak = infinity}(0));
  REQUIRE_ERROR("lr::Constant: warmup must be >= 0, got -1", lr::Constant{.peak = 1, .warmup = -1}(0));
  REQUIRE_ERROR("lr::Cosine: total must be >= 1, got 0", lr::Cosine{.peak = 1}(0));
  REQUIRE_ERROR("lr::Cosine: warmup must be <= total, got 6 updates of 5",
                lr::Cosine{.peak = 1, .warmup = 6, .total = 5}(0));
  REQUIRE_ERROR("lr::Linear: warmup must be >= 0, got -9223372036854775808",
                lr::Linear{.peak = 1, .warmup = std::numeric_limits<std::int64_t>::min(), .total = 5}(0));
  REQUIRE_ERROR("lr::Linear: end must be in [0, peak]; it is a rate, not a factor, got 0.1",
                lr::Linear{.peak = 1e-3, .total = 5, .end = 0.1}(0));
  REQUIRE_ERROR("end must be in [0, peak]", lr::Linear{.peak = 1, .total = 5, .end = not_a_number}(0));
  REQUIRE_ERROR("start must be in [0, peak], got 2", lr::Linear{.peak = 1, .total = 5, .start = 2}(0));
  REQUIRE_ERROR("start must be in [0, peak], got nan", lr::Linear{.peak = 1, .total = 5, .start = not_a_number}(0));
  REQUIRE_ERROR("lr::WarmupStableDecay: decay must be in [1, total - warmup], got 0",
                lr::WarmupStableDecay{.peak = 1, .total = 5}(0));
  REQUIRE_ERROR("decay must be in [1, total - warmup], got 4",
                lr::WarmupStableDecay{.peak = 1, .warmup = 2, .total = 5, .decay = 4}(0));
  REQUIRE_ERROR("lr::Cosine: the update must be >= 0, got -1", lr::Cosine{.peak = 1, .total = 5}(-1));
  CHECK_THROWS_AS(lr::Constant{}(0), std::invalid_argument);
}
