// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/svg_readings.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/detail/watching/svg_series.hpp>

#include <fmt/format.h>

#include <cmath>
#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string point_text(const CurvePoint& point, double unit) {
  return fmt::format("{} at update {}", number_text(point.value / unit), count_text(point.update));
}

/// Of one series, at the pointer; with its update where that is another.
GRADACCUM_INLINE std::string svg_reading(const ChartSeries& series, const Chart& chart, double update, double width) {
  const auto* const piece = series.curve.nearest(update);
  if (!piece) return "";
  const bool is_there = std::abs(piece->middle() - update) <= width;
  const auto where = is_there ? std::string() : fmt::format(" at {}", number_text(std::round(piece->middle())));
  return fmt::format("<tspan x=\"100%\" dy=\"1.3em\"><tspan class=\"key {}\">■</tspan> {} {}{}</tspan>",
                     series_class(series), series_name(series, chart), number_text(piece->mean / chart.unit), where);
}

/// The empty title keeps that of the whole chart away.
GRADACCUM_INLINE std::string svg_readings(const Chart& chart, const ChartFrame& frame) {
  constexpr int bands = 48;
  constexpr std::size_t most_series = 8;
  std::string svg = "<g class=\"readings\"><title></title>\n";
  const double width = (frame.x.high - frame.x.low) / bands;
  for (int i = 0; i < bands; ++i) {
    const double update = frame.x.low + (i + 0.5) * width, percent = 100 * (i + 0.5) / bands;
    svg += fmt::format(
        "<g><rect x=\"{0:.2f}%\" y=\"0\" width=\"{1:.2f}%\" height=\"100%\"/><line x1=\"{2:.2f}%\" x2=\"{2:.2f}%\" "
        "y1=\"0\" y2=\"100%\"/><text x=\"100%\" y=\"0\" text-anchor=\"end\"><tspan x=\"100%\" dy=\"1em\">update "
        "{3}</tspan>",
        100.0 * i / bands, 100.0 / bands, percent, number_text(std::round(update)));
    for (std::size_t s = 0; s < chart.series.size() && s < most_series; ++s)
      svg += svg_reading(chart.series[s], chart, update, width);
    svg += "</text></g>\n";
  }
  return svg + "</g>\n";
}

}  // namespace gradaccum::detail
