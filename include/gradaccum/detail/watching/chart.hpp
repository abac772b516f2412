// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/curves.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/curve.hpp>

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// A run whose curves a page shows.
struct PageRun {
  std::string name = {};  ///< empty where it is the only one
  Curves curves = {};
};

struct ChartSeries {
  std::string name = {};   ///< in the legend
  Curve curve = {};        ///< its own: the page is drawn from it, whatever becomes of the run's
  std::size_t colour = 0;  ///< counted from 0
  bool dashed = false;     ///< the second of a run that has one colour
};

/// Curves that are drawn on the same axes.
struct Chart {
  std::string name = {};     ///< what is after the last `/` in the names of its curves: `loss`
  std::string heading = {};  ///< for people: `Loss`
  bool is_stacked = false;   ///< the series are parts of a whole
  bool by_decades = false;   ///< may have a logarithmic axis
  bool has_bands = true;     ///< shows extremes, too; of several runs the means alone
  double unit = 1;           ///< what numbers are shown in
  std::vector<ChartSeries> series = {};
};

/// What all of `memory/…` is on.
inline constexpr std::string_view memory_chart = "memory";

/// `validation` and `loss` of `validation/loss`. All of `memory/…` is on one chart.
struct CurveName {
  std::string_view series, chart;
  explicit CurveName(std::string_view name);
};

/// The charts of a page, in its order: losses and metrics first. The colour of a curve says which of several runs it is
/// of; where there is one run, which of its curves.
std::vector<Chart> charts_of(const std::deque<PageRun>& runs);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/chart.ipp>
#endif
