// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/storage_count.hpp>

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE void for_each_storage(const at::Tensor& tensor, c10::function_ref<void(const c10::Storage&)> use) {
  if (!tensor.defined() || tensor.is_meta()) return;
  if (tensor.is_sparse()) {
    use(tensor._indices().storage());
    use(tensor._values().storage());
  } else if (tensor.has_storage()) {
    use(tensor.storage());
  }
}

GRADACCUM_INLINE std::int64_t StorageCount::add(const at::Tensor& tensor) {
  std::int64_t bytes = 0;
  for_each_storage(tensor, [&](const c10::Storage& storage) {
    if (counted_.insert(storage.unsafeGetStorageImpl()).second) bytes += static_cast<std::int64_t>(storage.nbytes());
  });
  return bytes;
}

}  // namespace gradaccum::detail
