// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// A tensor of 8-bit moments: a code for each element, in the parameter's memory order, and the largest magnitude of
/// each block of `eight_bit_block` elements.
struct Codes {
  at::Tensor codes, scales;
};

/// Returns the codes' values in float32. Works on any device.
at::Tensor decoded(const Codes& moments, bool is_signed);

/// Returns the nearest codes of a plain float32 tensor, in a tie the smaller one (in kernels: the one nearer to 0).
/// Works on any device.
Codes encoded(const at::Tensor& numbers, bool is_signed);

/// Returns the moments in the parameter's element order; zeros if there are none. Throws if loaded moments do not fit.
Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed, const char* name);

/// Returns dense moments. Dense scales are 1-D.
Codes dense_of(const Codes& moments, bool is_signed);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/eight_bit_moments.ipp>
#endif
