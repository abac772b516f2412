// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum::detail {

/// Functions that bring tensors into the form that kernels expect: plain arrays without strides.

/// Returns true if the elements of both tensors lie in the same order in memory.
bool same_order(const at::Tensor& a, const at::Tensor& b);

/// Returns true if the memory alone defines the tensor: no gaps, lazy zeros, or pending negation or conjugation.
bool is_plain(const at::Tensor& t);

/// Returns a tensor with the sizes and strides of plain copies of `t`: itself, or a meta tensor.
at::Tensor plain_layout_of(const at::Tensor& t);

/// Returns `t`, or a copy if needed, with its elements in the order of `like`, which is plain.
at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& t, at::ScalarType dtype);

/// Returns `t`, or a copy if needed, in row-major order.
at::Tensor row_major(const at::Tensor& t, at::ScalarType dtype);

/// Returns true for the real dtypes of 64, 32 and 16 bits, for which there are kernels.
bool has_kernels(at::ScalarType dtype);

/// Returns the dtype of an optimizer's computations and state: float32 for 16-bit parameters.
at::ScalarType state_type(const at::Tensor& parameter);

/// Returns the dtype in which a step reads a gradient: its own if it equals the parameter's, else the state's.
at::ScalarType gradient_type(const at::Tensor& parameter, const at::Tensor& gradient);

/// Returns the gradient, already multiplied if its dtype is wider than the state's, since it may exceed the range of
/// float32 before. `multiplier` is then set to 1.
at::Tensor in_reach(const at::Tensor& gradient, const at::Tensor& parameter, double& multiplier);

/// Returns state in the dtype and order that the parameter's step needs; zeros if undefined. Throws if it does not fit.
at::Tensor checked_state(const at::Tensor& state, const at::Tensor& parameter, const char* name);

/// Checks the assumptions of kernels, which know neither shapes nor devices. Must run before the first kernel writes.
void check_can_be_stepped(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient);

/// Returns a real view of a complex tensor, or the tensor itself if it is real.
at::Tensor as_real(const at::Tensor& t);

/// Copies `stepped` into the parameter, or only bumps its version if they are the same tensor. Autograd must see the
/// change, as it may have saved the parameter for a backward pass.
void write_back(const at::Tensor& parameter, const at::Tensor& stepped);

/// The number of copied elements at which a loop runs its pending steps, which bounds the memory for copies.
inline constexpr std::int64_t most_copied = 1 << 22;

}  // namespace gradaccum::detail
