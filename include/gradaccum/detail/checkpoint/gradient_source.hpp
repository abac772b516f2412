// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>

namespace gradaccum::detail {

inline std::int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes());
}

/// A meta tensor with the layout and storage size of a tensor.
at::Tensor layout_of(const at::Tensor& tensor);

bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// Stands in for the part before a stage, so that the stage's input is not a leaf, as between stages.
struct GradientSink : torch::autograd::Function<GradientSink> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients);
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Stands in for the part after a stage. Its backward makes a gradient of a given layout that only the backward pass
/// owns, like the gradients between stages. `*memory` becomes a weak reference to the gradient's storage.
struct GradientSource : torch::autograd::Function<GradientSource> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            const at::Tensor& layout, WeakStorage* memory);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/gradient_source.ipp>
#endif
