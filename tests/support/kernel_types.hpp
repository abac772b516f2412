// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>

#include <c10/core/ScalarType.h>

#include <vector>

namespace testing {

/// A combination of dtypes that has a kernel.
struct KernelTypes {
  at::ScalarType parameter, gradient;
  bool rounded = false;

  at::ScalarType state() const { return parameter == at::kDouble ? at::kDouble : at::kFloat; }
  gradaccum::detail::OperandTypes of_kernel() const { return {parameter, gradient, rounded}; }
};

inline const std::vector<KernelTypes> all_kernel_types{{at::kDouble, at::kDouble},
                                                       {at::kFloat, at::kFloat},
                                                       {at::kHalf, at::kHalf},
                                                       {at::kHalf, at::kFloat},
                                                       {at::kBFloat16, at::kBFloat16},
                                                       {at::kBFloat16, at::kFloat},
                                                       {at::kBFloat16, at::kBFloat16, true},
                                                       {at::kBFloat16, at::kFloat, true}};

}  // namespace testing
