// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/any_batches.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void cannot_be_divided(const std::type_info& type) {
  TORCH_CHECK(false,
              "FitMemory: a batch must be one that can be divided: a Tensor, a pair or tuple of them, one with "
              ".data and .target and nothing else, a vector of samples that are no tensors, got ",
              name_of_class(type),
              ": declare slice(batch, from, to), which gives these samples, and batch_size(batch) beside the class");
}

}  // namespace gradaccum::detail
