// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gradaccum::detail {

bool can_be_summed_here(const at::Tensor& tensor);

/// All numbers of a tensor, in whatever order they lie; or the rows that a table has, in order, whose other numbers are
/// zero.
struct SquaredNumbers {
  at::Tensor values;
  at::Tensor rows = {};  ///< int64; undefined: `values` is all
  std::int64_t rows_of_table = 0;
};

/// The sum of squares of each (for whose values `can_be_summed_here`), in one parallel loop over the elements of all of
/// them. The bits do not depend on the number of threads, nor on whether zeros are there.
std::vector<double> sums_of_squares(const std::vector<SquaredNumbers>& all);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/sum_of_squares.ipp>
#endif
