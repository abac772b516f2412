// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <vector>

namespace gradaccum::detail {

/// From where to where an axis has to go for numbers to be seen.
struct AxisRange {
  double low = 0, high = 1;
  bool spans_decades = false;  ///< all are > 0, and many of them smaller by far than others
};

/// Of finite numbers, in any order. A few that lie far outside of all others are left out: they would flatten the rest.
AxisRange range_of_axis(std::vector<double> numbers);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/axis_range.ipp>
#endif
