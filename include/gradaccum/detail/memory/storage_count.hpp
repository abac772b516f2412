// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <unordered_set>

namespace gradaccum::detail {

/// Calls `use` with the storage of a tensor: twice for a sparse one, never for one without memory.
void for_each_storage(const at::Tensor& tensor, c10::function_ref<void(const c10::Storage&)> use);

/// A count of tensors' memory, each storage once. Does not keep the memory.
class StorageCount {
 public:
  /// Returns the bytes of this tensor that have not been counted yet.
  std::int64_t add(const at::Tensor& tensor);

 private:
  std::unordered_set<const void*> counted_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/storage_count.ipp>
#endif
