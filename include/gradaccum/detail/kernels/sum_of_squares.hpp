// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gradaccum::detail {

bool can_be_summed_here(const at::Tensor& tensor);

/// All elements of a tensor in any order; or the given rows of a table, in ascending order, whose other rows are zero.
struct SquaredNumbers {
  at::Tensor values;
  at::Tensor rows = {};  ///< int64; undefined: `values` is the whole tensor
  std::int64_t rows_of_table = 0;
};

/// Computes each sum of squares (`can_be_summed_here` for the values) in one parallel loop over all elements. The bits
/// depend neither on the number of threads nor on whether zero rows are stored.
std::vector<double> sums_of_squares(const std::vector<SquaredNumbers>& all);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/sum_of_squares.ipp>
#endif
