// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/keep_freed_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/kept_pages.hpp>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gradaccum::detail {

/// LibTorch's CPU allocator, except that large blocks are kept.
class KeepingAllocator final : public c10::Allocator {
 public:
  static KeepingAllocator& only() {
    static auto* const allocator = new KeepingAllocator();  // never destroyed: tensors may be freed last of all
    return *allocator;
  }

  GRADACCUM_INLINE c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* block);

  KeptPages pages_;
};

/// Allocates a block. Leaves it to LibTorch, which reports the error, if there is no memory.
GRADACCUM_INLINE c10::DataPtr KeepingAllocator::allocate(std::size_t bytes) {
  constexpr std::size_t least = std::size_t{1} << 20;
  void* const block = bytes < least ? nullptr : pages_.allocate(bytes);
  if (!block) return c10::GetDefaultCPUAllocator()->allocate(bytes);
  c10::profiledCPUMemoryReporter().New(block, bytes);
  return {block, block, release, c10::Device(c10::kCPU)};
}

/// Frees a block. Reports it to the profiler first, before another can have the same address.
GRADACCUM_INLINE void KeepingAllocator::release(void* block) {
  auto& pages = only().pages_;
  if (!pages.has(block)) return c10::GetDefaultCPUAllocator()->raw_deleter()(block);
  c10::profiledCPUMemoryReporter().Delete(block);
  pages.free(block);
}

/// Keeps large blocks from now on, unless there is another allocator already. Returns true if they are kept.
GRADACCUM_INLINE bool keep_large_blocks() {
#ifdef __linux__
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(&KeepingAllocator::only());
  return c10::GetCPUAllocator() == &KeepingAllocator::only();
#else
  return false;
#endif
}

/// Keeps small blocks, and memory of other objects than tensors. Returns true if they are kept.
GRADACCUM_INLINE bool keep_memory_of_malloc() {
#ifdef __GLIBC__
  constexpr int gigabyte = 1 << 30, most_of_old_versions = 32 << 20, pad = 64 << 20;
  return (mallopt(M_MMAP_THRESHOLD, gigabyte) == 1 || mallopt(M_MMAP_THRESHOLD, most_of_old_versions) == 1) &&
         mallopt(M_TRIM_THRESHOLD, gigabyte) == 1 && mallopt(M_TOP_PAD, pad) == 1;
#else
  return false;
#endif
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE bool keep_freed_memory() {
  const bool large = detail::keep_large_blocks(), small = detail::keep_memory_of_malloc();
  return large || small;
}

}  // namespace gradaccum
