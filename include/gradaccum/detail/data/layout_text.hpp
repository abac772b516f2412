// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// `Float [64, 784]`, and what is not as usual: strides, the device, none.
std::string layout_text(const at::Tensor& tensor);
/// Of several, with a comma between them. `any_rows`: the first dimension of each is `*`.
std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows = false);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/layout_text.ipp>
#endif
