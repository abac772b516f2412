// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/FunctionRef.h>

#include <functional>
#include <vector>

namespace gradaccum::detail {

/// Changes that wait until all that is loaded together fits, and undo functions for those made at once.
class PendingChanges {
 public:
  /// Runs `load`; calls may nest. If it throws, drops the changes deferred in it and runs its undo functions, last
  /// first.
  void together(c10::function_ref<void()> load);

  /// Runs `change` at once if no load is in progress.
  void when_all_fit(std::function<void()> change);
  void if_not_all_fit(std::function<void()> undo);
  /// Discards all changes that are deferred from now on.
  void wait_forever() { ++depth_; }

 private:
  std::vector<std::function<void()>> changes_, undo_;
  int depth_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/pending_changes.ipp>
#endif
