// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace gradaccum::detail {

/// Whether a count has stood still for too long, in the time of who looks: one that was suspended meanwhile, or found
/// no processor, has not listened, either.
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
