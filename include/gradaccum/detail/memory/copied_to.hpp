// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// Copies a host tensor to a device. To CUDA it goes from pinned memory, so that the host does not wait.
at::Tensor copied_to(at::Device device, const at::Tensor& of_host);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/copied_to.ipp>
#endif
