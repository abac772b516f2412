// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/keep_freed_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gradaccum {

GRADACCUM_INLINE bool keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int gigabyte = 1 << 30, most_of_old_versions = 32 << 20, pad = 64 << 20;
  return (mallopt(M_MMAP_THRESHOLD, gigabyte) == 1 || mallopt(M_MMAP_THRESHOLD, most_of_old_versions) == 1) &&
         mallopt(M_TRIM_THRESHOLD, gigabyte) == 1 && mallopt(M_TOP_PAD, pad) == 1;
#else
  return false;
#endif
}

}  // namespace gradaccum
