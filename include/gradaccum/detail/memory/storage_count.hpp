// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <unordered_set>

namespace gradaccum::detail {

/// Gives `use` the memory that a tensor is a view of: two pieces, of a sparse one; none, of one that has no memory.
void for_each_storage(const at::Tensor& tensor, c10::function_ref<void(const c10::Storage&)> use);

/// Memory of tensors, each piece counted once. Does not keep it.
class StorageCount {
 public:
  /// The bytes of what has not been counted yet.
  std::int64_t add(const at::Tensor& tensor);

 private:
  std::unordered_set<const void*> counted_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/storage_count.ipp>
#endif
