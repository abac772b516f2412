// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/memory_by_phase.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/storage_count.hpp>

#include <c10/core/Storage.h>

#include <algorithm>
#include <unordered_set>

namespace gradaccum::detail {

GRADACCUM_INLINE MemoryByPhase::MemoryByPhase(std::function<void(SeeHeld)> for_each_held)
    : for_each_held_(std::move(for_each_held)) {
  std::unordered_set<const void*> known;
  for_each_held_([&](std::int64_t MemoryByKind::*, const at::Tensor& tensor) {
    for_each_storage(tensor, [&](const c10::Storage& storage) {
      if (known.insert(storage.unsafeGetStorageImpl()).second)
        older_.emplace_back(storage.getWeakStorageImpl(), static_cast<std::int64_t>(storage.nbytes()));
    });
  });
  rest_before_ = now().rest;
}

GRADACCUM_INLINE void MemoryByPhase::end(const std::string& phase) {
  auto bytes = now();
  const auto rest = bytes.rest;
  if (phase == "forward") {
    bytes.activations = std::max<std::int64_t>(rest - rest_before_, 0);
    bytes.rest = rest - bytes.activations;
  }
  rest_before_ = rest;
  const auto same = std::find_if(phases_.begin(), phases_.end(), [&](auto& of) { return of.phase == phase; });
  if (same == phases_.end())
    phases_.push_back({phase, bytes});
  else if (bytes.total() > same->bytes.total())
    same->bytes = bytes;
}

GRADACCUM_INLINE MemoryByKind MemoryByPhase::now() const {
  StorageCount count;
  MemoryByKind bytes;
  for_each_held_([&](std::int64_t MemoryByKind::*kind, const at::Tensor& tensor) { bytes.*kind += count.add(tensor); });
  bytes.rest = older_bytes() + meter_.live_bytes() - bytes.total();
  return bytes;
}

GRADACCUM_INLINE std::int64_t MemoryByPhase::older_bytes() const {
  std::int64_t bytes = 0;
  for (auto& [storage, its_bytes] : older_)
    if (!storage.expired()) bytes += its_bytes;
  return bytes;
}

}  // namespace gradaccum::detail
