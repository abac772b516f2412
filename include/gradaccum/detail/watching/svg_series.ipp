// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/svg_series.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/html_text.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string_view>

namespace gradaccum::detail {

/// How many colours the page has.
inline constexpr std::size_t page_colours = 8;

GRADACCUM_INLINE std::string series_class(const ChartSeries& series) {
  return fmt::format("s{}{}", series.colour % page_colours + 1, series.dashed ? " d" : "");
}

GRADACCUM_INLINE std::string series_name(const ChartSeries& series, const Chart& chart) {
  return html_text(series.name.empty() ? chart.name : series.name, 60);
}

/// Points of a path, in thousandths of both sides.
class SvgPath {
 public:
  void move(double right, double down) { add('M', right, down), alone_ = true; }
  void line(double right, double down) { add('L', right, down), alone_ = false; }
  void join(double right, double down) { is_open_ ? line(right, down) : move(right, down); }
  /// A point between two gaps is a dot.
  void gap() {
    if (is_open_ && alone_) text_ += "h0";
    is_open_ = false;
  }
  void close() { text_ += 'Z', is_open_ = false; }
  const std::string& text() const { return text_; }

 private:
  void add(char command, double right, double down) {
    fmt::format_to(std::back_inserter(text_), "{}{:.1f} {:.1f}", command, 1000 * right, 1000 * down);
    is_open_ = true;
  }

  std::string text_;
  bool is_open_ = false, alone_ = false;
};

GRADACCUM_INLINE std::string path_element(const SvgPath& path, std::string_view kind, const ChartSeries& series) {
  return path.text().empty()
             ? ""
             : fmt::format("<path class=\"{} {}\" d=\"{}\"/>\n", kind, series_class(series), path.text());
}

GRADACCUM_INLINE std::string svg_line(const ChartSeries& series, const ChartFrame& frame) {
  SvgPath path;
  for (auto& piece : series.curve.pieces())
    piece.finite == 0 ? path.gap() : path.join(frame.right(piece.middle()), frame.down(piece.mean));
  path.gap();
  return path_element(path, "line", series);
}

/// From the lowest to the highest, where a line shows the mean of several points: there and back.
GRADACCUM_INLINE std::string svg_band(const ChartSeries& series, const ChartFrame& frame) {
  SvgPath path;
  const auto& pieces = series.curve.pieces();
  for (std::size_t begin = 0, end = 0; begin < pieces.size(); begin = std::max(end, begin + 1)) {
    for (end = begin; end < pieces.size() && pieces[end].finite > 0; ++end)
      path.join(frame.right(pieces[end].middle()), frame.down(pieces[end].highest.value));
    for (auto i = end; i > begin; --i)
      path.join(frame.right(pieces[i - 1].middle()), frame.down(pieces[i - 1].lowest.value));
    if (end > begin) path.close();
  }
  return series.curve.level() == 0 ? "" : path_element(path, "band", series);
}

GRADACCUM_INLINE std::string svg_layers(const Chart& chart, const ChartLayers& layers, const ChartFrame& frame) {
  std::string svg;
  const auto count = layers.updates.size();
  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    SvgPath path;
    for (std::size_t i = 0; i < count; ++i) path.join(frame.right(layers.updates[i]), frame.down(layers.tops[s][i]));
    for (auto i = count; i > 0; --i)
      path.join(frame.right(layers.updates[i - 1]), frame.down(s == 0 ? 0 : layers.tops[s - 1][i - 1]));
    path.close();
    svg += path_element(path, "area", chart.series[s]);
  }
  return svg;
}

/// A few points are each to be seen; many are a line.
GRADACCUM_INLINE std::string svg_dots(const ChartSeries& series, const ChartFrame& frame) {
  constexpr std::size_t few = 40;
  std::string svg;
  const auto& pieces = series.curve.pieces();
  if (pieces.size() > few) return svg;
  for (auto& piece : pieces)
    if (const auto down = frame.down(piece.mean); piece.finite > 0 && down >= 0 && down <= 1)
      svg += fmt::format("<circle class=\"dot {}\" cx=\"{:.2f}%\" cy=\"{:.2f}%\" r=\"2.5\"/>\n", series_class(series),
                         100 * frame.right(piece.middle()), 100 * down);
  return svg;
}

GRADACCUM_INLINE std::string svg_curves(const Chart& chart, const ChartFrame& frame) {
  std::string svg;
  for (auto& series : chart.series)
    if (chart.has_bands) svg += svg_band(series, frame);
  for (auto& series : chart.series) svg += svg_line(series, frame);
  return svg;
}

}  // namespace gradaccum::detail
