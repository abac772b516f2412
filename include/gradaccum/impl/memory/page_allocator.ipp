// SPDX-License-Identifier: Apache-2.0
// Allocates blocks of whole pages, and keeps freed pages for the next ones.
#pragma once

#include <gradaccum/detail/memory/page_allocator.hpp>
#include <gradaccum/detail/platform/platform.hpp>

#include <c10/core/CPUAllocator.h>

#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

inline constexpr std::size_t unit_of_pages = std::size_t{1} << 16;  // a multiple of the page size of any system

GRADACCUM_INLINE std::size_t rounded_up(std::size_t bytes) {
  return (bytes + unit_of_pages - 1) / unit_of_pages * unit_of_pages;
}

/// Returns at most `most` bytes of a warm range to the kernel.
GRADACCUM_INLINE void PageAllocator::discard(std::size_t most) {
  const auto range = warm_.take_from_largest(most);
  discard_pages({reinterpret_cast<std::byte*>(range.address), range.bytes});
  cold_.add(range);
}

/// Returns warm pages to the kernel before this number of cold bytes is used.
GRADACCUM_INLINE void PageAllocator::make_room(std::size_t bytes) {
  constexpr std::size_t always = std::size_t{16} << 20;
  const auto most_used = std::max(used_ + bytes, most_used_);
  const auto most_resident = most_used + most_used / 10 + always;
  while (warm_.bytes() > 0 && used_ + warm_.bytes() + bytes > most_resident)
    discard(rounded_up(used_ + warm_.bytes() + bytes - most_resident));
}

GRADACCUM_INLINE bool PageAllocator::map_more(std::size_t bytes) {
  constexpr std::size_t at_once = std::size_t{256} << 20;
  for (const auto size : {std::max(bytes, at_once), bytes}) {
    void* const address = map_memory(size);
    if (!address) continue;
    cold_.add({reinterpret_cast<std::uintptr_t>(address), size});
    return true;
  }
  return false;
}

GRADACCUM_INLINE void* PageAllocator::allocate(std::size_t bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) return nullptr;  // rounding up could overflow
  bytes = rounded_up(bytes);
  const std::lock_guard lock(mutex_);
  auto range = warm_.take(bytes);
  if (!range) {
    make_room(bytes);
    range = cold_.take(bytes);
    if (!range && map_more(bytes)) range = cold_.take(bytes);
  }
  if (!range) return nullptr;
  void* const block = reinterpret_cast<void*>(range->address);
  blocks_.emplace(block, bytes);
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  return block;
}

GRADACCUM_INLINE void PageAllocator::free(void* block) {
  const std::lock_guard lock(mutex_);
  const auto node = blocks_.extract(block);
  used_ -= node.mapped();
  warm_.add({reinterpret_cast<std::uintptr_t>(block), node.mapped()});
  if (!keeps_) discard(warm_.bytes());
}

GRADACCUM_INLINE void PageAllocator::stop_keeping() {
  const std::lock_guard lock(mutex_);
  keeps_ = false;
  while (warm_.bytes() > 0) discard(warm_.bytes());
}

GRADACCUM_INLINE PageAllocator::~PageAllocator() {
  for (auto* const ranges : {&warm_, &cold_})
    while (ranges->bytes() > 0) {
      const auto range = ranges->take_from_largest(ranges->bytes());
      unmap({reinterpret_cast<std::byte*>(range.address), range.bytes});
    }
}

GRADACCUM_INLINE c10::DataPtr allocate_from(const std::shared_ptr<PageAllocator>& pages, std::size_t bytes) {
  struct Block {
    std::shared_ptr<PageAllocator> pages;
    void* address;
  };
  const auto release = [](void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    c10::profiledCPUMemoryReporter().Delete(block->address);
    block->pages->free(block->address);
  };
  auto block = std::make_unique<Block>(Block{pages, nullptr});
  auto* const address = block->address = pages->allocate(bytes);
  if (!address) return {};
  c10::DataPtr memory(address, block.release(), release, c10::Device(c10::kCPU));
  c10::profiledCPUMemoryReporter().New(address, bytes);
  return memory;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
