// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/page_allocator.hpp>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace gradaccum::detail {

/// Memory for the CPU tensors that compiled code creates, kept from one run to the next. Code frees all activations of
/// a step in its backward pass, and glibc returns that much to the kernel, which must then clear every page again.
///
/// Tensors may outlive it. A process with its own CPU allocator, as by `keep_freed_memory`, uses that one.
class StepMemory {
 public:
  StepMemory() = default;
  StepMemory(const StepMemory&) = delete;
  ~StepMemory() { pages_->stop_keeping(); }

  /// Called by the code that runs: returns a new `at::Tensor` in a `StepMemory`, or null if LibTorch should create it.
  /// For small tensors, glibc is as fast.
  static void* empty_strided(void* memory, std::int64_t dims, const std::int64_t* sizes, const std::int64_t* strides,
                             std::int32_t dtype) {
    constexpr std::size_t least = std::size_t{1} << 17;
    const auto type = static_cast<at::ScalarType>(dtype);
    const at::IntArrayRef all_sizes(sizes, static_cast<std::size_t>(dims)), all_strides(strides, all_sizes.size());
    const auto bytes = at::detail::computeStorageNbytes(all_sizes, all_strides, c10::elementSize(type));
    auto* const allocator = c10::GetCPUAllocator();
    if (bytes < least || allocator != c10::GetDefaultCPUAllocator()) return nullptr;
    auto block = allocate_from(static_cast<StepMemory*>(memory)->pages_, bytes);
    if (!block) return nullptr;
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(block), allocator, /*resizable=*/true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(type));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(all_sizes, all_strides);
    return new at::Tensor(std::move(tensor));
  }

 private:
  std::shared_ptr<PageAllocator> pages_ = std::make_shared<PageAllocator>();
};

}  // namespace gradaccum::detail
