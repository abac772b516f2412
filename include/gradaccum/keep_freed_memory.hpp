// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum {

/// Makes the process keep the memory of freed CPU tensors for the next ones. Returns true if it does.
///
///     ga::keep_freed_memory();                           // first thing in main()
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       sgd.step();
///       sgd.zero_grad();
///     }
///
/// A training loop frees and allocates the same buffers for every batch. By default glibc returns large ones to the
/// kernel each time, which must then clear every page again. For a small network this takes up to half of an epoch's
/// time, and is a reason why C++ programs have been slower than Python's, which keeps more.
///
/// On Linux, tensors of 1 MiB and more get whole pages from an allocator that keeps freed memory, but returns enough to
/// stay within a tenth above the peak of all tensors. A heap that keeps everything, as glibc's can, grows to half as
/// much again, because of gaps between tensors that are freed in another order than they were allocated. If LibTorch
/// has already been given another CPU allocator, that stays. With glibc, small tensors are kept, too. On other systems
/// nothing changes, and the result is false.
///
/// Applies to the whole process and cannot be undone: the process keeps its peak. So the library never calls it by
/// itself. For glibc's heap alone, environment variables do the same: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_
/// (1073741824 both) and MALLOC_TOP_PAD_ (67108864).
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/memory/memory.ipp>
#endif
