// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <stdexcept>

#include <sys/mman.h>
#include <unistd.h>

namespace testing {

/// A copy of a tensor next to an inaccessible page, which follows the copy's end or, with `at_front`, precedes its
/// beginning.
class GuardedMemory {
 public:
  explicit GuardedMemory(const at::Tensor& numbers, bool at_front = false)
      : used_((numbers.nbytes() + page() - 1) / page() * page()), all_(used_ + 2 * page()) {
    memory_ = static_cast<char*>(mmap(nullptr, all_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED || (used_ > 0 && mprotect(memory_ + page(), used_, PROT_READ | PROT_WRITE) != 0))
      throw std::runtime_error("GuardedMemory: no memory");
    auto* const begin = memory_ + page() + (at_front ? 0 : used_ - numbers.nbytes());
    tensor_ = at::from_blob(begin, numbers.sizes(), numbers.options()).copy_(numbers);
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() {
    tensor_.reset();
    munmap(memory_, all_);
  }

  const at::Tensor& tensor() const { return tensor_; }
  void* data() const { return tensor_.mutable_data_ptr(); }

 private:
  static std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

  std::size_t used_, all_;
  char* memory_;
  at::Tensor tensor_;
};

}  // namespace testing
