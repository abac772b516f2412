// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace testing {

/// Makes the CPU's `fails_at`-th allocation of a scope, counted from 0, run out of memory, and any of more than `most`
/// bytes.
class FailingAllocatorScope : public c10::Allocator {
 public:
  explicit FailingAllocatorScope(std::int64_t fails_at, std::size_t most = SIZE_MAX)
      : left_(fails_at), most_(most), usual_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, /*priority=*/100);
  }
  FailingAllocatorScope(const FailingAllocatorScope&) = delete;
  FailingAllocatorScope& operator=(const FailingAllocatorScope&) = delete;
  ~FailingAllocatorScope() override { c10::SetCPUAllocator(usual_, /*priority=*/100); }

  bool failed() const { return failed_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (left_-- == 0 || bytes > most_) {
      failed_ = true;
      TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
    }
    return usual_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return usual_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { usual_->copy_data(to, from, bytes); }

 private:
  std::atomic<std::int64_t> left_;
  std::size_t most_;
  c10::Allocator* usual_;
  bool failed_ = false;
};

}  // namespace testing
