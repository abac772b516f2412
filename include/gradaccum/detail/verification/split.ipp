// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/split.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps) {
  TORCH_CHECK(rows >= steps, "verify_accumulation: the batch must have a row for each of ", steps,
              " micro-batches, got ", rows);
  std::vector<std::int64_t> parts;
  for (std::int64_t i = 0; i < steps; ++i) parts.push_back(rows / steps + (i < rows % steps));
  return parts;
}

}  // namespace gradaccum::detail
