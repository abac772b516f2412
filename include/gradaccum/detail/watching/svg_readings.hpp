// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/chart.hpp>
#include <gradaccum/detail/watching/chart_frame.hpp>
#include <gradaccum/detail/watching/curve.hpp>

#include <string>

namespace gradaccum::detail {

/// `0.4312 at update 1,240`
std::string point_text(const CurvePoint& point, double unit);

/// Bands over a chart, each with the numbers that are to be shown while the pointer is over it, by CSS alone.
std::string svg_readings(const Chart& chart, const ChartFrame& frame);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/svg_readings.ipp>
#endif
