// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/axis.hpp>
#include <gradaccum/detail/watching/chart.hpp>
#include <gradaccum/detail/watching/curve.hpp>

#include <cstddef>
#include <vector>

namespace gradaccum::detail {

/// The layers of a stacked chart: how high each series reaches at each of some updates, those below it included.
struct ChartLayers {
  std::vector<double> updates = {};
  std::vector<std::vector<double>> tops = {};  ///< by series
};
ChartLayers layers_of(const Chart& chart);

/// The axes of a chart, and where its numbers lie between them: in [0, 1], to the right and downwards.
struct ChartFrame {
  Axis x = {}, y = {};
  double unit = 1;
  std::vector<CurvePiece> above = {}, below = {};  ///< of all series, what reaches out of it

  explicit ChartFrame(const Chart& chart, const ChartLayers& layers = {});
  double right(double update) const { return x.place(update); }
  /// A number far outside is a little outside.
  double down(double value) const;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/chart_frame.ipp>
#endif
