// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/chart.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE CurveName::CurveName(std::string_view name) {
  const auto slash = name.rfind('/');
  if (slash == std::string_view::npos) {
    chart = name;
  } else if (name.starts_with("memory/")) {
    chart = memory_chart;
    series = name.substr(chart.size() + 1);
  } else {
    series = name.substr(0, slash);
    chart = name.substr(slash + 1);
  }
}

/// Charts that all trainings have; others come after the first of them.
struct KnownChart {
  std::string_view name;
  const char* heading;
  int place;
};
GRADACCUM_INLINE const KnownChart& known_chart(std::string_view name) {
  static constexpr std::array<KnownChart, 7> known{{{"loss", "Loss", 0},
                                                    {"accuracy", "Accuracy", 1},
                                                    {"lr", "Learning rate", 3},
                                                    {"grad_norm", "Gradient norm", 4},
                                                    {"samples_per_second", "Samples per second", 5},
                                                    {memory_chart, "Memory", 6},
                                                    {"", nullptr, 2}}};
  return *std::find_if(known.begin(), known.end() - 1, [&](auto& chart) { return chart.name == name; });
}

GRADACCUM_INLINE Chart new_chart(std::string_view name) {
  const auto* const heading = known_chart(name).heading;
  return {.name = std::string(name),
          .heading = heading ? heading : std::string(name),
          .is_stacked = name == memory_chart,
          .by_decades = name == "lr"};
}

/// The sum of curves, at the places of the first.
GRADACCUM_INLINE Curve sum_of(const std::vector<ChartSeries>& series) {
  Curve sum;
  for (auto& piece : series.front().curve.pieces()) {
    double all = 0;
    for (auto& part : series)
      if (const auto* const there = part.curve.nearest(piece.middle())) all += there->mean;
    sum.add(piece.last, all);
  }
  return sum;
}

/// Of several runs only the whole of what is stacked can be compared.
GRADACCUM_INLINE std::vector<ChartSeries> series_of_run(const PageRun& run, const Chart& chart, bool is_only_run) {
  std::vector<ChartSeries> all;
  for (auto& [name, curve] : run.curves.all())
    if (const CurveName parts(name); parts.chart == chart.name && !curve.empty())
      all.push_back({.name = std::string(parts.series), .curve = curve});
  if (is_only_run || !chart.is_stacked || all.empty()) return all;
  return {{.name = {}, .curve = sum_of(all)}};
}

/// The same on all charts: that of training is the first.
GRADACCUM_INLINE std::size_t place_of_prefix(const PageRun& run, std::string_view prefix) {
  std::vector<std::string_view> prefixes{"train"};
  for (auto& [name, curve] : run.curves.all())
    if (const CurveName parts(name); parts.chart != memory_chart && !parts.series.empty())
      prefixes.push_back(parts.series);
  std::size_t place = 0;
  for (auto other = prefixes.begin(); other != prefixes.end() && *other != prefix; ++other)
    place += std::find(prefixes.begin(), other, *other) == other;
  return prefix.empty() ? 0 : place;
}

GRADACCUM_INLINE void add_run(Chart& chart, const PageRun& run, std::size_t number, bool is_only_run) {
  auto all = series_of_run(run, chart, is_only_run);
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& series = all[i];
    series.colour = !is_only_run ? number : chart.is_stacked ? i : place_of_prefix(run, series.name);
    series.dashed = !is_only_run && i > 0;
    const bool needs_both = all.size() > 1 && !series.name.empty() && !run.name.empty();
    if (!is_only_run && !run.name.empty()) series.name = needs_both ? run.name + " · " + series.name : run.name;
    chart.series.push_back(std::move(series));
  }
}

/// Bytes are shown as MB, of 2^20 bytes, or GB.
GRADACCUM_INLINE void choose_unit(Chart& chart) {
  if (chart.name != memory_chart) return;
  double largest = 0;
  for (auto& series : chart.series)
    if (const auto highest = series.curve.highest()) largest = std::max(largest, highest->value);
  const bool in_gb = largest >= 10.0 * (1 << 30);
  chart.unit = in_gb ? 1 << 30 : 1 << 20;
  chart.heading += in_gb ? " (GB)" : " (MB)";
}

/// The page's own, if it has curves, and all that have a name.
GRADACCUM_INLINE std::vector<const PageRun*> shown_runs(const std::deque<PageRun>& runs) {
  std::vector<const PageRun*> shown;
  for (auto& run : runs)
    if (!run.name.empty() || !run.curves.empty()) shown.push_back(&run);
  return shown;
}

GRADACCUM_INLINE std::vector<Chart> charts_of(const std::deque<PageRun>& all) {
  std::vector<Chart> charts;
  const auto runs = shown_runs(all);
  for (const auto* const run : runs)
    for (auto& [name, curve] : run->curves.all()) {
      const auto chart = std::string(CurveName(name).chart);
      if (std::none_of(charts.begin(), charts.end(), [&chart](auto& other) { return other.name == chart; }))
        charts.push_back(new_chart(chart));
    }
  for (auto& chart : charts) {
    for (std::size_t i = 0; i < runs.size(); ++i) add_run(chart, *runs[i], i, runs.size() == 1);
    chart.is_stacked = chart.is_stacked && runs.size() == 1;
    chart.has_bands = runs.size() == 1;
    choose_unit(chart);
  }
  std::erase_if(charts, [](auto& chart) { return chart.series.empty(); });
  std::stable_sort(charts.begin(), charts.end(),
                   [](const auto& a, const auto& b) { return known_chart(a.name).place < known_chart(b.name).place; });
  return charts;
}

}  // namespace gradaccum::detail
