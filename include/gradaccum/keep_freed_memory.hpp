// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum {

/// Makes the process keep the memory of freed CPU tensors for the next ones; true if it does.
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
/// epoch, and a reason why C++ programs have been slower than Python's, which keeps more.
///
/// On Linux, tensors of 1 MiB and more get whole pages from an allocator that keeps what is freed, and gives back as
/// much as is needed for the process to stay within a tenth above the most that tensors have had at once: a heap that
/// keeps everything, as glibc's can, grows to half as much again, for gaps between tensors that come and go in another
/// order than they came. Where LibTorch has been given another allocator for the CPU, that one stays. With glibc,
/// small tensors are kept, too. Elsewhere nothing changes, and the answer is false.
///
/// For the whole process and for good: the process keeps its peak. So it is a call of yours, and never ours. From
/// outside, for glibc's heap alone: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ (1073741824 both) and
/// MALLOC_TOP_PAD_ (67108864).
bool keep_freed_memory();

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/keep_freed_memory.ipp>
#endif
