// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/forward_undo.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>

#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  for (auto& tensor : tensors) copies.push_back(tensor.defined() ? tensor.clone() : at::Tensor());
  return copies;
}

GRADACCUM_INLINE void ForwardUndo::put_back() const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (buffers_[i].defined()) buffers_[i].copy_(values_[i]);
  random_.restore();
}

}  // namespace gradaccum::detail
