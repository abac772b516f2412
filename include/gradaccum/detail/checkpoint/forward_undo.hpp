// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum::detail {

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);

/// Restores the state that forward passes change besides gradients: random generators, and a model's buffers, such as
/// BatchNorm's statistics. Holds a copy of the buffers.
class ForwardUndo {
 public:
  explicit ForwardUndo(const std::vector<at::Tensor>& buffers) : buffers_(buffers), values_(copies_of(buffers)) {}
  void put_back() const;

 private:
  std::vector<at::Tensor> buffers_, values_;
  RandomState random_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/forward_undo.ipp>
#endif
