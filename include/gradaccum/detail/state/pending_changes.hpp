// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Changes that wait until all that is loaded together has turned out to fit, and the way back from those that did not
/// wait.
class PendingChanges {
 public:
  /// Runs `load`, which may nest. An exception forgets what has come to wait in it, and undoes the rest, the last
  /// change first.
  template <class Load>
  void together(const Load& load) {
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

  /// At once where there is nothing to wait for.
  void when_all_fit(std::function<void()> change) {
    if (depth_ == 0) return change();
    changes_.push_back(std::move(change));
  }
  void if_not_all_fit(std::function<void()> undo) {
    if (depth_ > 0) undo_.push_back(std::move(undo));
  }
  /// Whatever comes to wait from here on never happens.
  void wait_forever() { ++depth_; }

 private:
  std::vector<std::function<void()>> changes_, undo_;
  int depth_ = 0;
};

}  // namespace gradaccum::detail
