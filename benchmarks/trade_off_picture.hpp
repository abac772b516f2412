// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace harness {

/// Memory and time of a training step, relative to the plain step.
struct Point {
  double memory, time;
};
struct TradeOff {
  std::string title;
  std::vector<Point> ours, peer;
};

namespace picture {

constexpr double width = 420, height = 300, left = 60, top = 50, most_time = 0.6;

inline double x_of(double memory) { return left + memory * width; }
inline double y_of(double time) { return top + height - std::min(time - 1, most_time) / most_time * height; }

inline std::string text(double x, double y, const std::string& what, const std::string& anchor = "middle") {
  return fmt::format("<text x='{:.0f}' y='{:.0f}' text-anchor='{}'>{}</text>\n", x, y, anchor, what);
}

inline std::string axes(const TradeOff& trade_off) {
  std::string svg =
      fmt::format("<rect x='{}' y='{}' width='{}' height='{}' fill='none' stroke='#999'/>\n", left, top, width, height);
  for (int percent = 0; percent <= 100; percent += 25)
    svg += text(x_of(percent / 100.0), top + height + 18, fmt::format("{} %", percent));
  for (int percent = 0; percent <= 60; percent += 20)
    svg += text(left - 8, y_of(1 + percent / 100.0) + 4, fmt::format("+{} %", percent), "end");
  svg += text(left + width / 2, top - 14, trade_off.title);
  return svg + text(left + width / 2, top + height + 38, "memory of activations, against plain; upwards: more time");
}

inline std::string points(std::vector<Point> all, const std::string& colour, bool joined) {
  std::sort(all.begin(), all.end(), [](const Point& a, const Point& b) { return a.memory < b.memory; });
  std::string svg, line;
  for (auto& point : all) {
    if (point.memory > 1.001) continue;
    svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='4' fill='{}'/>\n", x_of(point.memory), y_of(point.time),
                       colour);
    line += fmt::format("{:.1f},{:.1f} ", x_of(point.memory), y_of(point.time));
  }
  if (joined) svg += fmt::format("<polyline points='{}' fill='none' stroke='{}' stroke-width='2'/>\n", line, colour);
  return svg;
}

}  // namespace picture

/// Draws the pictures next to each other: ours as a line through its budgets, the peer as a dot per number of segments.
inline std::string to_svg(const std::vector<TradeOff>& trade_offs) {
  using namespace picture;
  const double step = left + width + 20;
  const double total = step * static_cast<double>(trade_offs.size());
  std::string svg = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0:.0f}' height='{1:.0f}' viewBox='0 0 {0:.0f} {1:.0f}' "
      "font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n",
      total, top + height + 80);
  for (std::size_t i = 0; i < trade_offs.size(); ++i)
    svg += fmt::format("<g transform='translate({:.0f},0)'>\n{}{}{}</g>\n", step * static_cast<double>(i),
                       axes(trade_offs[i]), points(trade_offs[i].peer, "#c44", false),
                       points(trade_offs[i].ours, "#27a", true));
  const double y = top + height + 62;
  svg += fmt::format("<circle cx='{0}' cy='{1}' r='4' fill='#27a'/>\n<circle cx='{2}' cy='{1}' r='4' fill='#c44'/>\n",
                     left, y, left + 300);
  svg += text(left + 10, y + 4, "CheckpointedSequential, by budget", "start");
  svg += text(left + 310, y + 4, "checkpoint_sequential's rule, by number of segments", "start");
  return svg + "</svg>\n";
}

}  // namespace harness
