// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

/// By a kernel of our own, which has shown that it does what ATen does.
bool can_be_normed_on_device(const at::Tensor& tensor);

/// The L2 norm of each, in float64: of tensors on one device for which `can_be_normed_on_device`. The bits depend on
/// nothing but the tensor. Does not wait for the device.
at::Tensor l2_norms_on_device(const std::vector<at::Tensor>& tensors);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/device_norms.ipp>
#endif
