// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/kernel_moves.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>

namespace gradaccum::detail {

/// Excludes gradients wider than the state: a float64 sum may exceed float32 before it is multiplied.
GRADACCUM_INLINE bool fits_kernel(const at::Tensor& parameter, const at::Tensor& gradient) {
  return has_kernels(at::toRealValueType(parameter.scalar_type())) && parameter.scalar_type() != at::kComplexHalf &&
         parameter.is_cuda() && at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter));
}

GRADACCUM_INLINE OperandTypes kernel_types(const at::Tensor& parameter, const at::Tensor& gradient, bool rounded) {
  const auto dtype = parameter.scalar_type();
  const bool same = gradient.scalar_type() == dtype;
  return {at::toRealValueType(dtype), at::toRealValueType(same ? dtype : state_type(parameter)), rounded};
}

}  // namespace gradaccum::detail
