// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// A tensor with memory of its own: a copy, unless nobody else has it.
at::Tensor owned(at::Tensor tensor);

/// Copies the numbers of a loaded tensor into one that is there, with all that shares its memory. Where nobody else has
/// the loaded one, the two change their memory in place of that: 134 MB in no time, and nothing can fail.
void load_into(const at::Tensor& to, const at::Tensor& loaded);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/owned_tensor.ipp>
#endif
