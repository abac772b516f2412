// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/axis.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE double Axis::place(double value) const {
  if (!logarithmic) return (value - low) / (high - low);
  return (std::log10(value) - std::log10(low)) / (std::log10(high) - std::log10(low));
}

/// A step between ticks: digit x 10^exponent.
struct TickStep {
  int digit, exponent;

  double size() const { return at(1); }
  /// So many steps: exact where that is possible, 0.3 and not 3 x 0.1.
  double at(double number) const {
    return exponent < 0 ? number * digit / std::pow(10.0, -exponent) : number * digit * std::pow(10.0, exponent);
  }
};

/// The smallest round one of at least this size.
GRADACCUM_INLINE TickStep round_step(double least) {
  const auto exponent = static_cast<int>(std::floor(std::log10(least)));
  for (const int digit : {1, 2, 5})
    if (const TickStep step{digit, exponent}; step.size() >= least * (1 - 1e-9)) return step;
  return {1, exponent + 1};
}

/// What ticks are written in: thousands, or a power of ten.
struct TickUnit {
  double size;
  std::string_view suffix;
  bool is_power = false;
};

GRADACCUM_INLINE TickUnit tick_unit(double largest) {
  static constexpr std::array<std::pair<double, const char*>, 4> units{
      {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
  if (largest >= 1e15 || (largest > 0 && largest < 0.999e-2)) return {1, "", true};
  for (const auto& [size, suffix] : units)
    if (largest >= 10 * size || (size > 1e3 && largest >= size)) return {size, suffix};
  return {1, ""};
}

/// `1.5e-4`
GRADACCUM_INLINE std::string power_text(double value) {
  const auto exponent = static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9));
  return fmt::format("{:.4g}e{}", value / std::pow(10.0, exponent), exponent);
}

GRADACCUM_INLINE std::string tick_text(double value, const TickUnit& unit, double step) {
  if (value == 0) return "0";
  if (unit.is_power) return power_text(value);
  const auto digits = static_cast<int>(std::ceil(-std::log10(step / unit.size) - 1e-6));
  return fmt::format("{:.{}f}{}", value / unit.size, std::clamp(digits, 0, 9), unit.suffix);
}

/// Ticks at all multiples of the step that lie between both ends.
GRADACCUM_INLINE std::vector<AxisTick> round_ticks(double low, double high, const TickStep& step) {
  std::vector<AxisTick> ticks;
  const auto unit = tick_unit(std::max(std::abs(low), std::abs(high)));
  const double first = std::ceil(low / step.size() - 1e-6), last = std::floor(high / step.size() + 1e-6);
  for (int i = 0; i <= 50 && first + i <= last; ++i) {
    const double value = step.at(first + i);
    ticks.push_back({value, tick_text(value, unit, step.size())});
  }
  return ticks;
}

/// Room around what does not change, and no more than doubles can tell apart.
GRADACCUM_INLINE std::pair<double, double> with_room(double low, double high) {
  constexpr double most = 1e300, least = 1e-290;
  low = std::clamp(low, -most, most);
  high = std::clamp(high, -most, most);
  const double size = std::max({std::abs(low), std::abs(high), least});
  if (high - low > 1e-9 * size) return {low, high};
  if (size <= least) return {0, 1};
  const double middle = low / 2 + high / 2;
  return {middle - size, middle + size};
}

GRADACCUM_INLINE Axis round_axis(double low, double high, int steps) {
  if (low > 0 && low < high && low < 0.3 * high) low = 0;
  const auto [from, to] = with_room(low, high);
  const auto step = round_step((to - from) / steps);
  Axis axis;
  axis.low = step.at(std::floor(from / step.size() + 1e-6));
  axis.high = step.at(std::ceil(to / step.size() - 1e-6));
  axis.ticks = round_ticks(axis.low, axis.high, step);
  return axis;
}

GRADACCUM_INLINE Axis whole_axis(double low, double high, int steps) {
  Axis axis;
  axis.low = low;
  axis.high = std::max(high, low + 1);
  axis.ticks = round_ticks(axis.low, axis.high, round_step(std::max((axis.high - axis.low) / steps, 1.0)));
  return axis;
}

GRADACCUM_INLINE Axis decades_axis(double low, double high) {
  const auto first = static_cast<int>(std::floor(std::log10(low) + 1e-9));
  const auto last = std::max(static_cast<int>(std::ceil(std::log10(high) - 1e-9)), first + 1);
  Axis axis;
  axis.logarithmic = true;
  axis.low = std::pow(10.0, first);
  axis.high = std::pow(10.0, last);
  const int every = (last - first + 5) / 6;
  for (int exponent = first; exponent <= last; exponent += every)
    axis.ticks.push_back({std::pow(10.0, exponent), exponent >= -2 && exponent <= 3
                                                        ? fmt::format("{:g}", std::pow(10.0, exponent))
                                                        : fmt::format("1e{}", exponent)});
  return axis;
}

}  // namespace gradaccum::detail
