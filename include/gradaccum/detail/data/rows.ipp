// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/rows.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t rows_of_all(const std::vector<at::Tensor>& tensors) {
  for (auto& tensor : tensors)
    TORCH_CHECK(tensor.defined() && tensor.dim() > 0,
                "every tensor of a batch that is split must have a first dimension, its rows, got ",
                tensor.defined() ? "one without" : "an undefined one");
  for (auto& tensor : tensors)
    TORCH_CHECK(tensor.size(0) == tensors[0].size(0), "the tensors of a batch must have as many rows each, got ",
                tensors[0].size(0), " and ", tensor.size(0));
  return tensors[0].size(0);
}

}  // namespace gradaccum::detail
