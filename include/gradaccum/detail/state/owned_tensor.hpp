// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <vector>

namespace gradaccum::detail {

/// Returns the tensor itself if nothing shares its memory, otherwise a copy.
at::Tensor owned(at::Tensor tensor);

/// Copies a loaded tensor into an existing one, whose aliases see the new values. If nothing else refers to `loaded`,
/// the two swap their memory instead, which takes no time even for large tensors (134 MB) and cannot fail.
void load_into(const at::Tensor& to, const at::Tensor& loaded);

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
