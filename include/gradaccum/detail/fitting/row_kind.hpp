// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/rows.hpp>
#include <gradaccum/detail/data/tensors_of.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace gradaccum::detail {

/// The properties of a batch's rows on which their memory depends.
struct RowKind {
  std::string form = {};                 ///< dtypes and numbers of dimensions
  std::vector<std::int64_t> sizes = {};  ///< sizes of a row, one tensor after the other
  std::int64_t elements = 0;             ///< elements per row
  std::string text = {};                 ///< description: `Float [*, 784], Long [*]`

  /// Returns whether rows of this kind take no less memory than those of `other`.
  bool covers(const RowKind& other) const;
  bool operator==(const RowKind& other) const { return form == other.form && sizes == other.sizes; }
};

RowKind kind_of(const std::vector<at::Tensor>& tensors, std::int64_t rows);

/// The kind of a batch's rows. All rows are of one kind in a vector of samples, and in a class with unknown tensors.
template <has_rows B>
RowKind kind_of_rows(const B& batch) {
  if constexpr (tells_its_tensors<B>)
    return kind_of(batch_tensors(batch), rows_of(batch));
  else if constexpr (is_tensor<B> || is_data_and_target<B> || holds_tensors_only<B>)
    return std::apply([&](auto&... tensors) { return kind_of({tensors...}, rows_of(batch)); }, tied_tensors(batch));
  else
    return {.text = "rows"};
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/row_kind.ipp>
#endif
