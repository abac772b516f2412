// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pending_changes.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void PendingChanges::together(c10::function_ref<void()> load) {
  const auto waiting = changes_.size(), changed = undo_.size();
  ++depth_;
  try {
    load();
  } catch (...) {
    --depth_;
    changes_.resize(waiting);
    for (; undo_.size() > changed; undo_.pop_back()) undo_.back()();
    throw;
  }
  if (--depth_ > 0) return;
  undo_.clear();
  for (auto& change : std::exchange(changes_, {})) change();
}

GRADACCUM_INLINE void PendingChanges::when_all_fit(std::function<void()> change) {
  if (depth_ == 0) return change();
  changes_.push_back(std::move(change));
}

GRADACCUM_INLINE void PendingChanges::if_not_all_fit(std::function<void()> undo) {
  if (depth_ > 0) undo_.push_back(std::move(undo));
}

}  // namespace gradaccum::detail
