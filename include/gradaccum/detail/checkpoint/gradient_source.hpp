// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>

namespace gradaccum::detail {

inline std::int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes());
}

/// The layout of a tensor, its storage's size included, as a tensor without memory.
inline at::Tensor layout_of(const at::Tensor& tensor) {
  const auto elements = storage_bytes(tensor) / static_cast<std::int64_t>(tensor.element_size());
  return at::empty({elements}, tensor.options().device(at::kMeta).requires_grad(false))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && storage_bytes(a) == storage_bytes(b);
}

/// Stands for what comes before a stage: the stage's input is no leaf, as between stages.
struct GradientSink : torch::autograd::Function<GradientSink> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) { return input.detach(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Stands for what comes after a stage: its backward makes a gradient of a given layout, which belongs to the backward
/// pass alone, as the gradients between stages do. `*memory` becomes its memory, without owning it.
struct GradientSource : torch::autograd::Function<GradientSource> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            const at::Tensor& layout, WeakStorage* memory) {
    context->saved_data["layout"] = layout;
    context->saved_data["device"] = output.device();
    context->saved_data["memory"] = reinterpret_cast<std::int64_t>(memory);
    return at::zeros({}, output.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    auto& saved = context->saved_data;
    const auto layout = saved["layout"].toTensor();
    const auto elements = storage_bytes(layout) / static_cast<std::int64_t>(layout.element_size());
    const auto gradient = at::zeros({elements}, layout.options().device(saved["device"].toDevice()));
    *reinterpret_cast<WeakStorage*>(saved["memory"].toInt()) = gradient.storage().getWeakStorageImpl();
    return {gradient.as_strided(layout.sizes(), layout.strides(), layout.storage_offset()), {}, {}};
  }
};

}  // namespace gradaccum::detail
