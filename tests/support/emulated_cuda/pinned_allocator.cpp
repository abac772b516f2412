// SPDX-License-Identifier: Apache-2.0
#include "allocators.hpp"

#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace emulated_cuda {
namespace {

/// The pinned addresses of the host.
class PinnedRanges {
 public:
  static PinnedRanges& get() {
    static auto& ranges = *new PinnedRanges;
    return ranges;
  }

  void add(const char* begin, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ends_.emplace(begin, begin + bytes);
  }

  void remove(const char* begin) {
    const std::lock_guard lock(mutex_);
    ends_.erase(begin);
  }

  bool contain(const char* address) {
    const std::lock_guard lock(mutex_);
    const auto after = ends_.upper_bound(address);
    return after != ends_.begin() && std::less<>()(address, std::prev(after)->second);
  }

 private:
  std::mutex mutex_;
  std::map<const char*, const char*> ends_;
};

void free_pinned(void* block) {
  if (!block) return;
  PinnedRanges::get().remove(static_cast<const char*>(block));
  c10::free_cpu(block);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const block = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (block) PinnedRanges::get().add(static_cast<const char*>(block), bytes);
    return {block, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* address) { return PinnedRanges::get().contain(static_cast<const char*>(address)); }

}  // namespace emulated_cuda
