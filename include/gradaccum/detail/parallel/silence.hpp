// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace gradaccum::detail {

/// Detects a counter that has stopped for too long. Each call adds at most a second, so that time in which the observer
/// itself was suspended, or got no processor, does not count.
class Silence {
 public:
  explicit Silence(std::chrono::milliseconds longest) : longest_(longest) {}

  bool too_long(std::int64_t count) {
    const auto now = Clock::now();
    const auto step = std::min<Clock::duration>(now - std::exchange(looked_, now), longest_step);
    so_far_ = count == std::exchange(count_, count) ? so_far_ + step : Clock::duration::zero();
    return so_far_ >= longest_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds longest_step{1};

  Clock::duration longest_, so_far_ = Clock::duration::zero();
  Clock::time_point looked_ = Clock::now();
  std::int64_t count_ = -1;
};

}  // namespace gradaccum::detail
