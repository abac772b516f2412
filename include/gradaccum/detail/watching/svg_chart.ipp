// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/svg_chart.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/chart_frame.hpp>
#include <gradaccum/detail/watching/html_text.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/detail/watching/svg_readings.hpp>
#include <gradaccum/detail/watching/svg_series.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string svg_axes(const ChartFrame& frame) {
  std::string svg = "<g class=\"axes\">\n";
  for (auto& tick : frame.y.ticks) {
    const double percent = 100 * (1 - frame.y.place(tick.value));
    svg += fmt::format(
        "<line x1=\"0\" x2=\"100%\" y1=\"{0:.2f}%\" y2=\"{0:.2f}%\"/><text x=\"-8\" y=\"{0:.2f}%\" dy=\".34em\" "
        "text-anchor=\"end\">{1}</text>\n",
        percent, tick.text);
  }
  for (auto& tick : frame.x.ticks)
    svg += fmt::format("<text x=\"{:.2f}%\" y=\"100%\" dy=\"1.5em\" text-anchor=\"middle\">{}</text>\n",
                       100 * frame.right(tick.value), tick.text);
  return svg + "</g>\n";
}

/// What reaches out of the chart, and what is no number.
GRADACCUM_INLINE std::string svg_marks(const Chart& chart, const ChartFrame& frame) {
  std::string svg;
  const auto mark = [&](double update, std::string_view place, std::string_view sign) {
    svg += fmt::format("<text class=\"mark\" x=\"{:.2f}%\" {} text-anchor=\"middle\">{}</text>\n",
                       100 * frame.right(update), place, sign);
  };
  for (auto& piece : frame.above) mark(static_cast<double>(piece.highest.update), "y=\"0\" dy=\"-.2em\"", "▲");
  for (auto& piece : frame.below) mark(static_cast<double>(piece.lowest.update), "y=\"100%\" dy=\".9em\"", "▼");
  for (auto& series : chart.series)
    for (auto& piece : series.curve.pieces())
      if (piece.gaps > 0) mark(piece.middle(), "y=\"100%\" dy=\"-.15em\"", "×");
  return svg;
}

/// For who cannot see it.
GRADACCUM_INLINE std::string svg_description(const Chart& chart) {
  std::string text;
  for (auto& series : chart.series) {
    const auto lowest = series.curve.lowest(), highest = series.curve.highest();
    if (!text.empty()) text += "; ";
    text += series_name(series, chart) + ": last " + point_text(series.curve.last(), chart.unit);
    if (lowest) text += ", lowest " + point_text(*lowest, chart.unit);
    if (highest) text += ", highest " + point_text(*highest, chart.unit);
  }
  return text;
}

GRADACCUM_INLINE std::string chart_legend(const Chart& chart) {
  const auto& first = chart.series.front();
  if (chart.series.size() == 1 && (first.name.empty() || first.name == "train")) return "";
  std::string html = "<ul class=\"legend\">";
  for (auto& series : chart.series)
    html += fmt::format("<li class=\"{}\">{}</li>", series_class(series), series_name(series, chart));
  return html + "</ul>";
}

GRADACCUM_INLINE std::string chart_note(const Chart& chart, const ChartFrame& frame) {
  CurvePiece above, below;
  for (auto& piece : frame.above) above.take(piece);
  for (auto& piece : frame.below) below.take(piece);
  std::int64_t gaps = 0;
  for (auto& series : chart.series) gaps += series.curve.gaps();
  std::string note;
  if (above.finite > 0) note += fmt::format("▲ cut off: up to {}. ", point_text(above.highest, chart.unit));
  if (below.finite > 0) note += fmt::format("▼ cut off: down to {}. ", point_text(below.lowest, chart.unit));
  if (gaps > 0) note += fmt::format("× NaN or infinite: {}. ", count_text(gaps));
  if (frame.y.logarithmic) note += "The scale is logarithmic.";
  return note.empty() ? "" : "<p class=\"note\">" + note + "</p>\n";
}

GRADACCUM_INLINE std::string svg_chart(const Chart& chart, std::size_t number) {
  const auto layers = chart.is_stacked ? layers_of(chart) : ChartLayers{};
  const ChartFrame frame(chart, layers);
  const bool is_stacked = !layers.tops.empty();
  auto html = fmt::format("<figure><figcaption><h3>{}</h3>{}</figcaption>\n", html_text(chart.heading, 60),
                          chart_legend(chart));
  html += fmt::format(
      "<svg class=\"plot\" role=\"img\" aria-labelledby=\"t{0} d{0}\"><title id=\"t{0}\">{1}</title><desc "
      "id=\"d{0}\">{2}</desc>\n",
      number, html_text(chart.heading, 60), svg_description(chart));
  html += svg_axes(frame);
  html += "<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" width=\"100%\" height=\"100%\">\n";
  html += is_stacked ? svg_layers(chart, layers, frame) : svg_curves(chart, frame);
  html += "</svg>\n";
  for (auto& series : chart.series)
    if (!is_stacked) html += svg_dots(series, frame);
  html += svg_marks(chart, frame);
  html += svg_readings(chart, frame);
  return html + "</svg>\n" + chart_note(chart, frame) + "</figure>\n";
}

}  // namespace gradaccum::detail
