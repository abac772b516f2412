// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/layout_text.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string layout_text_of(const at::Tensor& tensor, bool any_rows) {
  if (!tensor.defined()) return "none";
  std::string sizes;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    sizes += (i ? ", " : "") + (any_rows && i == 0 ? "*" : std::to_string(tensor.size(i)));
  auto text = std::string(c10::toString(tensor.scalar_type())) + " [" + sizes + "]";
  if (!tensor.is_cpu()) text += " on " + tensor.device().str();
  return text;
}

GRADACCUM_INLINE std::string layout_text(const at::Tensor& tensor) {
  auto text = layout_text_of(tensor, false);
  if (!tensor.defined() || tensor.is_contiguous()) return text;
  text += " strides";
  for (const auto stride : tensor.strides()) text += " " + std::to_string(stride);
  return text;
}

/// Omits strides, since tensors of a batch are made contiguous.
GRADACCUM_INLINE std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows) {
  std::string text;
  for (auto& tensor : tensors) text += (text.empty() ? "" : ", ") + layout_text_of(tensor, any_rows);
  return text;
}

}  // namespace gradaccum::detail
