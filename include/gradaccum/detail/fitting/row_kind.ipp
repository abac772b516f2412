// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/row_kind.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/layout_text.hpp>

#include <algorithm>
#include <functional>

namespace gradaccum::detail {

GRADACCUM_INLINE RowKind kind_of(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  RowKind kind;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    kind.form += c10::toString(tensor.scalar_type()) + std::to_string(tensor.dim());
    for (std::int64_t i = 1; i < tensor.dim(); ++i) kind.sizes.push_back(tensor.size(i));
    kind.elements += tensor.numel() / std::max<std::int64_t>(rows, 1);
  }
  kind.text = layout_text(tensors, /*any_rows=*/true);
  return kind;
}

GRADACCUM_INLINE bool RowKind::covers(const RowKind& other) const {
  return form == other.form && std::ranges::equal(sizes, other.sizes, std::ranges::greater_equal());
}

}  // namespace gradaccum::detail
