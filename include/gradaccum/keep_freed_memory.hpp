// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

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
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/keep_freed_memory.ipp>
#endif
