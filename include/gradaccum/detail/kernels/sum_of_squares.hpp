// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

bool can_be_summed_here(const at::Tensor& tensor);

/// The sum of squares of each tensor (for which `can_be_summed_here`), in one parallel loop over the elements of all of
/// them, in whatever order they lie. The bits do not depend on the number of threads.
std::vector<double> sums_of_squares(const std::vector<at::Tensor>& tensors);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/sum_of_squares.ipp>
#endif
