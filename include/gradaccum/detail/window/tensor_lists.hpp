// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

struct Multiplier;
class StreamMemory;

/// Passes over lists of gradients of any device, dtype and layout, none of which waits for a device.

/// Returns the `p`-norm of each non-empty gradient as one float64 tensor, on a device if any gradient is.
///
/// They are summed in float64, where squares of finite 16- and 32-bit numbers stay finite. On a device they may lie in
/// `memory`: see `l2_norms_on_device`.
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory& memory);
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p);

/// Returns the L2 norm of a few norms.
at::Tensor l2_norm_of(const at::Tensor& norms);

/// Returns true if squares of finite gradients may overflow, as in float64.
bool squares_may_overflow(const std::vector<at::Tensor>& gradients);

/// Returns 1 if an element is not finite, else 0: 0-dim float32. `l2_norms` is `norms(gradients, 2)`.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms);

/// Multiplies in place. The factor has float32 precision for 16-bit gradients, too.
void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/tensor_lists.ipp>
#endif
