// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// Describes a tensor as `Float [64, 784]`, with its device unless CPU, and its strides unless contiguous.
std::string layout_text(const at::Tensor& tensor);
/// Describes several tensors, separated by commas. With `any_rows`, the first dimension of each is `*`.
std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows = false);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/layout_text.ipp>
#endif
