// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

struct Multiplier;
class StreamMemory;

/// Passes over lists of gradients of any device, dtype and layout. None of them waits for a device.

/// The `p`-norm of each non-empty gradient, as one float64 tensor, on a device if any is on one.
///
/// Summed in float64: the squares of finite 16- and 32-bit numbers stay finite. On a device they may lie in `memory`:
/// see `l2_norms_on_device`.
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory& memory);
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p);

/// What few norms come to.
at::Tensor l2_norm_of(const at::Tensor& norms);

/// Says whether squares of finite gradients may overflow, as those of float64 do.
bool squares_may_overflow(const std::vector<at::Tensor>& gradients);

/// 0-dim float32: 1 if an element is not finite, else 0. `l2_norms` are what `norms(gradients, 2)` gave.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms);

/// Multiplies in place. The factor keeps float32 precision for 16-bit gradients, too.
void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/tensor_lists.ipp>
#endif
