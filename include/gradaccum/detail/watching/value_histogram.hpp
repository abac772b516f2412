// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace gradaccum::detail {

/// How the finite numbers of a tensor are distributed, in buckets whose limits grow by a tenth: TensorFlow's.
struct ValueHistogram {
  double min = std::numeric_limits<double>::infinity(), max = -min;
  double sum = 0, sum_of_squares = 0;
  std::int64_t numbers = 0, others = 0;  // the latter: NaN and infinities
  std::vector<double> limits = {};       // each bucket's right end, which is not in it; its left end is the one before
  std::vector<double> numbers_below = {};  // in each bucket
};

/// Of all elements, real and imaginary parts, times `factor`; of a sparse tensor, those that it has, duplicates summed.
/// Goes over them in pieces on the host, and waits for the device.
ValueHistogram histogram_of(const at::Tensor& tensor, double factor = 1);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/value_histogram.ipp>
#endif
