// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <string>
#include <vector>

namespace gradaccum::detail {

struct AxisTick {
  double value = 0;
  std::string text = {};
};

/// How numbers become places on a line.
struct Axis {
  double low = 0, high = 1;
  bool logarithmic = false;
  std::vector<AxisTick> ticks = {};

  /// 0 at the low end, 1 at the high one.
  double place(double value) const;
};

/// From a round number to a round number, with about so many steps of 1, 2 or 5 times a power of ten. One that begins
/// near 0 begins there.
Axis round_axis(double low, double high, int steps);

/// From `low` to `high` and no further, with whole numbers at its ticks.
Axis whole_axis(double low, double high, int steps);

/// By powers of ten; `low` > 0.
Axis decades_axis(double low, double high);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/axis.ipp>
#endif
