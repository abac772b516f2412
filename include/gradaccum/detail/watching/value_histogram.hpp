// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace gradaccum::detail {

/// The distribution of a tensor's finite numbers, in TensorFlow's buckets, whose limits grow by a tenth.
struct ValueHistogram {
  double min = std::numeric_limits<double>::infinity(), max = -min;
  double sum = 0, sum_of_squares = 0;
  std::int64_t numbers = 0, others = 0;    // others: NaN and infinities
  std::vector<double> limits = {};         // each bucket's right end, exclusive; its left end is the previous limit
  std::vector<double> numbers_below = {};  // counts by bucket
};

/// Counts all elements times `factor`: both parts of complex ones, and those stored by a sparse tensor, duplicates
/// summed. Copies them to the host piece by piece. Waits for the device.
ValueHistogram histogram_of(const at::Tensor& tensor, double factor = 1);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/value_histogram.ipp>
#endif
