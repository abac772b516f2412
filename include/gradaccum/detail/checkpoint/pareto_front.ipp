// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/pareto_front.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <limits>

namespace gradaccum::detail {

GRADACCUM_INLINE void add(ParetoFront& front, const Cost& point) {
  if (!front.empty() && !is_faster(point.seconds, front.back().seconds)) return;
  if (!front.empty() && front.back().peak == point.peak) front.pop_back();
  front.push_back(point);
}

GRADACCUM_INLINE ParetoFront merged(const ParetoFront& one, const ParetoFront& other) {
  ParetoFront both(one.size() + other.size()), front;
  std::merge(one.begin(), one.end(), other.begin(), other.end(), both.begin(),
             [](const Cost& a, const Cost& b) { return a.peak < b.peak; });
  for (const auto& point : both) add(front, point);
  return front;
}

GRADACCUM_INLINE ParetoFront thinned(const ParetoFront& front, std::size_t shares) {
  if (front.size() <= shares) return front;
  const auto least = front.front().peak, width = (front.back().peak - least) / static_cast<std::int64_t>(shares) + 1;
  const auto share = [&](std::size_t point) { return (front[point].peak - least) / width; };
  ParetoFront thin{front.front()};
  for (std::size_t point = 1; point < front.size(); ++point)
    if (point + 1 == front.size() || share(point) != share(point + 1)) thin.push_back(front[point]);
  return thin;
}

GRADACCUM_INLINE double fastest_within(std::int64_t bytes, const ParetoFront& front) {
  const auto beyond = std::upper_bound(front.begin(), front.end(), bytes,
                                       [](std::int64_t peak, const Cost& point) { return peak < point.peak; });
  return beyond == front.begin() ? std::numeric_limits<double>::infinity() : (beyond - 1)->seconds;
}

}  // namespace gradaccum::detail
