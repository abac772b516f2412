// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/row_kind.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/layout_text.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE RowKind kind_of(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  RowKind kind;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    kind.form += c10::toString(tensor.scalar_type()) + std::to_string(tensor.dim());
    kind.elements += tensor.numel() / std::max<std::int64_t>(rows, 1);
  }
  kind.text = layout_text(tensors, /*any_rows=*/true);
  return kind;
}

}  // namespace gradaccum::detail
