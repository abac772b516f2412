// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum::detail {

/// Tensors as kernels want them, which see numbers one after another and know no strides.

/// The elements of both lie in the same order in memory.
bool same_order(const at::Tensor& a, const at::Tensor& b);

/// All is said by the memory itself: no gaps, no lazy zeros, negations or conjugates.
bool is_plain(const at::Tensor& t);

/// What has the sizes and strides of plain copies of `t`: itself, or a tensor without memory.
at::Tensor plain_layout_of(const at::Tensor& t);

/// `t` with its elements in the order of `like`, which is plain; a copy where need be.
at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& t, at::ScalarType dtype);

/// `t`, or a copy of it, with the rows one after another.
at::Tensor row_major(const at::Tensor& t, at::ScalarType dtype);

/// Kernels know arrays of these numbers: of 64, 32 and 16 bits.
bool has_kernels(at::ScalarType dtype);

/// The type that optimizers compute with and keep their state in: float32 for 16-bit parameters.
at::ScalarType state_type(const at::Tensor& parameter);

/// A state tensor of `parameter`, in the order of its elements; made of zeros if there is none. What was loaded is
/// checked.
at::Tensor settled(const at::Tensor& state, const at::Tensor& parameter, const char* name);

/// What kernels, which see neither shapes nor devices, take for granted. Before the first of them writes anything.
void check_can_be_stepped(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient);
/// The same for optimizers whose state moves on for every element.
void check_can_be_stepped_densely(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient);

/// Real numbers that share the memory.
at::Tensor as_real(const at::Tensor& t);

/// Ends the step of a parameter in `stepped`, which may be the parameter itself. Autograd has to know that it has
/// changed: it may be saved for a backward pass.
void write_back(const at::Tensor& parameter, const at::Tensor& stepped);

/// A parameter in the memory in which it is stepped: its own, or a copy that is written back at the end; and its
/// gradient, the elements in the same order.
class DenseOperands {
 public:
  DenseOperands(const at::Tensor& parameter, const at::Tensor& gradient, at::ScalarType dtype);

  at::Tensor parameter() const { return as_real(parameter_); }
  at::Tensor gradient() const { return as_real(gradient_); }
  std::int64_t copied() const { return copied_; }  ///< elements
  void write_back() const { detail::write_back(owner_, parameter_); }

 private:
  at::Tensor owner_, parameter_, gradient_;
  std::int64_t copied_ = 0;
};

/// Copies are made for some parameters at a time, where there are to be any: elements that they may have together.
inline constexpr std::int64_t most_copied = 1 << 22;

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/dense.ipp>
#endif
