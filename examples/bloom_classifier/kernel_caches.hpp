// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

namespace bloom {

/// oneDNN and LibTorch each cache a kernel for every shape of a product in 16 bits, up to 1024 of about 1 MB, and
/// reviews have hundreds of lengths. A few are enough for one review after another. Call this first in main().
inline void limit_kernel_caches() {
  for (const auto* variable : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"})
    ::setenv(variable, "64", /*overwrite=*/0);
}

}  // namespace bloom
