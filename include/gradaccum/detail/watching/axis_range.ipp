// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/axis_range.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace gradaccum::detail {

/// So far from most numbers, in spreads of these, is far outside.
inline constexpr double far_outside = 3;

GRADACCUM_INLINE double quantile_of_sorted(const std::vector<double>& numbers, double share) {
  return numbers[static_cast<std::size_t>(share * static_cast<double>(numbers.size() - 1) + 0.5)];
}

GRADACCUM_INLINE AxisRange range_of_axis(std::vector<double> numbers) {
  if (numbers.empty()) return {};
  std::sort(numbers.begin(), numbers.end());
  const auto quantile = [&numbers](double share) { return quantile_of_sorted(numbers, share); };
  AxisRange range{.low = numbers.front(), .high = numbers.back()};
  range.spans_decades = numbers.front() > 0 && quantile(0.9) / quantile(0.1) >= 60;
  if (numbers.size() < 30) return range;
  const double low = quantile(0.02), high = quantile(0.98);
  const double spread = std::max(high / 2 - low / 2, 1e-3 * std::max(std::abs(low), std::abs(high)) / 2);
  if (range.high / 2 - high / 2 > far_outside * spread) range.high = high + spread / 2;
  if (low / 2 - range.low / 2 > far_outside * spread) range.low = low - spread / 2;
  return range;
}

}  // namespace gradaccum::detail
