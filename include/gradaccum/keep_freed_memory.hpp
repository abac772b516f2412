// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gradaccum {

/// Makes the C library keep the memory of freed CPU tensors for the next ones; true if it did.
///
///     ga::keep_freed_memory();                           // first thing in main()
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       sgd.step();
///       sgd.zero_grad();
///     }
///
/// A training loop frees and allocates the same buffers for every batch. glibc by default hands large ones back to the
/// kernel each time, which has to clear every page of them anew: for a small network up to half of the time of an
/// epoch, and a reason why C++ programs have been slower than Python's, which keeps more. Where the C library is
/// another, nothing changes, and the answer is false; libraries that replace malloc (jemalloc) keep memory by
/// themselves.
///
/// For the whole process and for good: the process keeps its peak. So it is a call of yours, and never ours. The same
/// from outside: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ (1073741824 both) and MALLOC_TOP_PAD_ (67108864).
inline bool keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int gigabyte = 1 << 30, most_of_old_versions = 32 << 20, pad = 64 << 20;
  return (mallopt(M_MMAP_THRESHOLD, gigabyte) == 1 || mallopt(M_MMAP_THRESHOLD, most_of_old_versions) == 1) &&
         mallopt(M_TRIM_THRESHOLD, gigabyte) == 1 && mallopt(M_TOP_PAD, pad) == 1;
#else
  return false;
#endif
}

}  // namespace gradaccum
