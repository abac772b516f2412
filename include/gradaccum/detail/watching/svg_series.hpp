// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/chart.hpp>
#include <gradaccum/detail/watching/chart_frame.hpp>

#include <string>

namespace gradaccum::detail {

/// Its classes in the style of the page, which have eight colours; and what it is called on its chart, as HTML.
std::string series_class(const ChartSeries& series);
std::string series_name(const ChartSeries& series, const Chart& chart);

/// The series of a chart as elements of an SVG of 1000 by 1000, which is stretched: lines through means, bands from the
/// lowest to the highest; or layers.
std::string svg_curves(const Chart& chart, const ChartFrame& frame);
std::string svg_layers(const Chart& chart, const ChartLayers& layers, const ChartFrame& frame);

/// The points of a series that has few, as elements of an SVG that is not stretched.
std::string svg_dots(const ChartSeries& series, const ChartFrame& frame);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/svg_series.ipp>
#endif
