// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/chart_frame.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/axis_range.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE ChartLayers layers_of(const Chart& chart) {
  ChartLayers layers;
  for (auto& piece : chart.series.front().curve.pieces()) layers.updates.push_back(piece.middle());
  std::vector<double> top(layers.updates.size(), 0);
  for (auto& series : chart.series) {
    for (std::size_t i = 0; i < top.size(); ++i)
      if (const auto* const piece = series.curve.nearest(layers.updates[i])) top[i] += piece->mean;
    layers.tops.push_back(top);
  }
  return layers;
}

/// One that begins near the first update begins there: with 0.
GRADACCUM_INLINE Axis update_axis(const Chart& chart) {
  auto first = chart.series.front().curve.pieces().front().first, last = first;
  for (auto& series : chart.series) {
    first = std::min(first, series.curve.pieces().front().first);
    last = std::max(last, series.curve.pieces().back().last);
  }
  const auto low = static_cast<double>(first), high = static_cast<double>(last);
  return whole_axis(low > 0 && low < 0.1 * high ? 0 : low, high, 5);
}

/// What is drawn of it.
GRADACCUM_INLINE double lowest_of(const CurvePiece& piece, const Chart& chart) {
  return chart.has_bands ? piece.lowest.value : piece.mean;
}
GRADACCUM_INLINE double highest_of(const CurvePiece& piece, const Chart& chart) {
  return chart.has_bands ? piece.highest.value : piece.mean;
}

GRADACCUM_INLINE std::vector<double> numbers_of(const Chart& chart) {
  std::vector<double> numbers;
  for (auto& series : chart.series)
    for (auto& piece : series.curve.pieces())
      if (piece.finite > 0)
        for (const double number : {piece.mean, lowest_of(piece, chart), highest_of(piece, chart)})
          numbers.push_back(number / chart.unit);
  return numbers;
}

GRADACCUM_INLINE Axis value_axis(const Chart& chart) {
  constexpr int steps = 4;
  const auto extent = range_of_axis(numbers_of(chart));
  if (chart.by_decades && extent.spans_decades) return decades_axis(extent.low, extent.high);
  return round_axis(extent.low, extent.high, steps);
}

GRADACCUM_INLINE Axis layers_axis(const Chart& chart, const ChartLayers& layers) {
  const auto& top = layers.tops.back();
  return round_axis(0, *std::max_element(top.begin(), top.end()) / chart.unit, 4);
}

GRADACCUM_INLINE ChartFrame::ChartFrame(const Chart& chart, const ChartLayers& layers)
    : x(update_axis(chart)), y(layers.tops.empty() ? value_axis(chart) : layers_axis(chart, layers)), unit(chart.unit) {
  if (!layers.tops.empty()) return;
  for (auto& series : chart.series)
    for (auto& piece : series.curve.pieces()) {
      if (piece.finite > 0 && highest_of(piece, chart) / unit > y.high) above.push_back(piece);
      if (piece.finite > 0 && lowest_of(piece, chart) / unit < y.low) below.push_back(piece);
    }
}

GRADACCUM_INLINE double ChartFrame::down(double value) const {
  return std::clamp(1 - y.place(value / unit), -0.5, 1.5);
}

}  // namespace gradaccum::detail
