// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/FunctionRef.h>

#include <functional>
#include <vector>

namespace gradaccum::detail {

/// Changes that wait until all that is loaded together has turned out to fit, and the way back from those that did not
/// wait.
class PendingChanges {
 public:
  /// Runs `load`, which may nest. An exception forgets what has come to wait in it, and undoes the rest, the last
  /// change first.
  void together(c10::function_ref<void()> load);

  /// At once where there is nothing to wait for.
  void when_all_fit(std::function<void()> change);
  void if_not_all_fit(std::function<void()> undo);
  /// Whatever comes to wait from here on never happens.
  void wait_forever() { ++depth_; }

 private:
  std::vector<std::function<void()>> changes_, undo_;
  int depth_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/state/pending_changes.ipp>
#endif
