// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

namespace bloom {

/// oneDNN, and LibTorch on top of it, keep a kernel for each shape of a product in 16 bits, 1024 of them each, some 1
/// MB a piece: reviews have hundreds of lengths. A few are enough for one review after another. First thing in main().
inline void limit_kernel_caches() {
  for (const auto* variable : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"})
    ::setenv(variable, "64", /*overwrite=*/0);
}

}  // namespace bloom
