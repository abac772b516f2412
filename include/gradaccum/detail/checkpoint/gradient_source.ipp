// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/gradient_source.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor layout_of(const at::Tensor& tensor) {
  const auto elements = storage_bytes(tensor) / static_cast<std::int64_t>(tensor.element_size());
  return at::empty({elements}, tensor.options().device(at::kMeta).requires_grad(false))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

GRADACCUM_INLINE bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && storage_bytes(a) == storage_bytes(b);
}

GRADACCUM_INLINE at::Tensor GradientSink::forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
  return input.detach();
}
GRADACCUM_INLINE torch::autograd::variable_list GradientSink::backward(torch::autograd::AutogradContext*,
                                                                       torch::autograd::variable_list gradients) {
  return gradients;
}

GRADACCUM_INLINE at::Tensor GradientSource::forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                                                    const at::Tensor& layout, WeakStorage* memory) {
  context->saved_data["layout"] = layout;
  context->saved_data["device"] = output.device();
  context->saved_data["memory"] = reinterpret_cast<std::int64_t>(memory);
  return at::zeros({}, output.options());
}

GRADACCUM_INLINE torch::autograd::variable_list GradientSource::backward(torch::autograd::AutogradContext* context,
                                                                         const torch::autograd::variable_list&) {
  auto& saved = context->saved_data;
  const auto layout = saved["layout"].toTensor();
  const auto elements = storage_bytes(layout) / static_cast<std::int64_t>(layout.element_size());
  const auto gradient = at::zeros({elements}, layout.options().device(saved["device"].toDevice()));
  *reinterpret_cast<WeakStorage*>(saved["memory"].toInt()) = gradient.storage().getWeakStorageImpl();
  return {gradient.as_strided(layout.sizes(), layout.strides(), layout.storage_offset()), {}, {}};
}

}  // namespace gradaccum::detail
