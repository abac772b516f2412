// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>

namespace fashion_mnist {

/// Makes the CPU's n-th allocation of a scope fail, counted from 0, to test an update that runs out of memory.
class FailingMemory : public c10::Allocator {
 public:
  explicit FailingMemory(std::int64_t n) : left_(n) { c10::SetCPUAllocator(this, /*priority=*/100); }
  FailingMemory(const FailingMemory&) = delete;
  FailingMemory& operator=(const FailingMemory&) = delete;
  ~FailingMemory() override { c10::SetCPUAllocator(usual_, /*priority=*/100); }

  bool failed() const { return left_ < 0; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (left_-- == 0) TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory, as was asked for: ", bytes);
    return usual_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return usual_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { usual_->copy_data(to, from, bytes); }

 private:
  std::int64_t left_;
  c10::Allocator* usual_ = c10::GetCPUAllocator();
};

}  // namespace fashion_mnist
