// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/own_kernels.hpp>
#include <gradaccum/detail/kernels/steps.hpp>

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>

#include <cstddef>
#include <utility>

namespace gradaccum::detail {

/// A tensor, or a number, as a vector in a step's arithmetic: on devices without kernels for a step, ATen runs it.
struct TensorVector {
  static TensorVector all(double x) { return {at::native::wrapped_scalar_tensor(x)}; }

  friend TensorVector operator+(const TensorVector& a, const TensorVector& b) { return {a.tensor + b.tensor}; }
  friend TensorVector operator-(const TensorVector& a, const TensorVector& b) { return {a.tensor - b.tensor}; }
  friend TensorVector operator*(const TensorVector& a, const TensorVector& b) { return {a.tensor * b.tensor}; }
  friend TensorVector operator/(const TensorVector& a, const TensorVector& b) { return {a.tensor / b.tensor}; }
  friend TensorVector multiply_add(const TensorVector& a, const TensorVector& b, const TensorVector& c) {
    return {a.tensor * b.tensor + c.tensor};
  }
  friend TensorVector square_root(const TensorVector& a) { return {a.tensor.sqrt()}; }
  friend TensorVector magnitude(const TensorVector& a) { return {a.tensor.abs()}; }
  friend TensorVector larger(const TensorVector& a, const TensorVector& b) {
    return {at::where(a.tensor.gt(b.tensor), a.tensor, b.tensor)};
  }
  friend TensorVector smaller(const TensorVector& a, const TensorVector& b) {
    return {at::where(a.tensor.lt(b.tensor), a.tensor, b.tensor)};
  }
  friend TensorVector sign(const TensorVector& a) {
    return {at::where(a.tensor.isnan(), a.tensor, a.tensor.sign())};  // NaN stays
  }

  at::Tensor tensor;
};

/// Runs a step's arithmetic on whole tensors. `changed` has the parameter and the state, which it replaces.
template <class Step>
void step_tensors(const Plain& numbers, const at::Tensor& gradient, at::Tensor* changed) {
  const own_kernels::Arithmetic<Step, TensorVector> arithmetic(numbers.as<NumbersOf<Step>>());
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    TensorVector all[]{{changed[0]}, {changed[1 + i]}...};
    arithmetic(all[0], TensorVector{gradient}, all[1 + i]...);
    changed[0] = all[0].tensor;
    ((changed[1 + i] = all[1 + i].tensor), ...);
  }
  (std::make_index_sequence<number_of_states<Step>>());
}

}  // namespace gradaccum::detail
