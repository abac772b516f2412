// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/arguments.hpp>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void cannot_be_divided(const std::type_info& type) {
  TORCH_CHECK(false,
              "FitMemory: a batch must be one that can be divided: a Tensor, a pair or tuple of them, one with "
              ".data and .target and nothing else, a vector of samples that are no tensors, got ",
              name_of_class(type),
              ": declare slice(batch, from, to), which gives these samples, and batch_size(batch) beside the class");
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
