// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// Returns the tensor itself if nothing shares its memory, otherwise a copy.
at::Tensor owned(at::Tensor tensor);

/// Copies a loaded tensor into an existing one, whose aliases see the new values. If nothing else refers to `loaded`,
/// the two swap their memory instead, which takes no time even for large tensors (134 MB) and cannot fail.
void load_into(const at::Tensor& to, const at::Tensor& loaded);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/owned_tensor.ipp>
#endif
