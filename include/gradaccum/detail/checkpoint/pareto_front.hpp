// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace gradaccum::detail {

/// The most bytes alive at once, and the time.
struct Cost {
  std::int64_t peak = 0;
  double seconds = 0;
};

/// What something can cost: the more bytes, the fewer seconds. Sorted; each point is faster than all before it.
using ParetoFront = std::vector<Cost>;

/// Faster by more than what the rounding of sums can do.
inline bool is_faster(double seconds, double than) { return seconds < than * (1 - 1e-12); }

/// Points are added in the order of their peaks.
inline void add(ParetoFront& front, const Cost& point) {
  if (!front.empty() && !is_faster(point.seconds, front.back().seconds)) return;
  if (!front.empty() && front.back().peak == point.peak) front.pop_back();
  front.push_back(point);
}

/// What is cheapest of both.
inline ParetoFront merged(const ParetoFront& one, const ParetoFront& other) {
  ParetoFront both(one.size() + other.size()), front;
  std::merge(one.begin(), one.end(), other.begin(), other.end(), both.begin(),
             [](const Cost& a, const Cost& b) { return a.peak < b.peak; });
  for (const auto& point : both) add(front, point);
  return front;
}

/// The fastest point of each of `shares` equal shares of the bytes; and the first point: what is possible stays so.
inline ParetoFront thinned(const ParetoFront& front, std::size_t shares) {
  if (front.size() <= shares) return front;
  const auto least = front.front().peak, width = (front.back().peak - least) / static_cast<std::int64_t>(shares) + 1;
  const auto share = [&](std::size_t point) { return (front[point].peak - least) / width; };
  ParetoFront thin{front.front()};
  for (std::size_t point = 1; point < front.size(); ++point)
    if (point + 1 == front.size() || share(point) != share(point + 1)) thin.push_back(front[point]);
  return thin;
}

/// Infinity if so few bytes do not do.
inline double fastest_within(std::int64_t bytes, const ParetoFront& front) {
  const auto beyond = std::upper_bound(front.begin(), front.end(), bytes,
                                       [](std::int64_t peak, const Cost& point) { return peak < point.peak; });
  return beyond == front.begin() ? std::numeric_limits<double>::infinity() : (beyond - 1)->seconds;
}

}  // namespace gradaccum::detail
