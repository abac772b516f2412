// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/fitting/checkpoint_search.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void CheckpointSearch::find_parts(torch::nn::Module& module,
                                                   const std::vector<CheckpointedSequential>& more) {
  if (std::exchange(found_, true)) return;
  for (auto& part : module.modules(/*include_self=*/false))
    if (auto checkpointed = std::dynamic_pointer_cast<CheckpointedSequentialImpl>(part);
        checkpointed && checkpointed->options().memory_budget > 0)
      parts_.push_back(std::move(checkpointed));
  for (auto& part : more) parts_.push_back(part.ptr());
  for (auto& part : parts_) part->set_memory_budget(0);
}

GRADACCUM_INLINE void CheckpointSearch::share(std::int64_t bytes) {
  if (!way_.checkpointed || budget_ > 0) return;
  set_budget(std::max<std::int64_t>(bytes / 4 * 3 / static_cast<std::int64_t>(parts_.size()), 1));
}

GRADACCUM_INLINE void CheckpointSearch::set_budget(std::int64_t each) {
  if (std::exchange(budget_, each) == each) return;
  for (auto& part : parts_) part->set_memory_budget(each);
}

GRADACCUM_INLINE std::int64_t CheckpointSearch::bytes() const {
  std::int64_t all = 0;
  if (way_.checkpointed)
    for (auto& part : parts_) all += part->plan().predicted.peak_bytes;
  return all;
}

GRADACCUM_INLINE bool CheckpointSearch::took(std::int64_t rows, double seconds, bool left) {
  constexpr std::size_t enough = 3;  // the fastest of so many says how long they take
  if (!searches()) return false;
  seconds_.push_back(seconds / static_cast<double>(rows));
  if (seconds_.size() < enough || !(left || way_.checkpointed)) return false;
  const auto fastest = std::ranges::min(seconds_);
  const bool faster = fastest < 0.98 * best_seconds_;
  if (faster) best_ = way_, best_seconds_ = fastest;
  const bool may_grow = left && (rows == way_.most_rows || !way_.checkpointed);
  if (faster && may_grow)
    go({/*checkpointed=*/true, 2 * rows}, /*settled=*/false);
  else
    go(best_, /*settled=*/true);
  return true;
}

GRADACCUM_INLINE bool CheckpointSearch::fails(std::int64_t over) {
  if (parts_.empty()) return false;
  if (way_.checkpointed && settled_) {
    const auto less = budget_ - (over + over / 8) / static_cast<std::int64_t>(parts_.size());
    if (over <= 0 || less <= 0) return false;
    set_budget(less);
    return true;
  }
  way_.checkpointed ? go(best_, /*settled=*/true) : go({/*checkpointed=*/true}, /*settled=*/true);
  return true;
}

GRADACCUM_INLINE void CheckpointSearch::go(const Way& way, bool settled) {
  seconds_.clear();
  settled_ = settled;
  way_ = way;
  if (!way_.checkpointed) set_budget(0);
}

GRADACCUM_INLINE void CheckpointSearch::state(Archive& archive) {
  auto way = way_;
  auto settled = settled_;
  auto budget = budget_;
  archive("checkpointed", way.checkpointed);
  archive("most_rows", way.most_rows);
  archive("settled", settled);
  archive("checkpoint_budget", budget);
  if (!archive.loading()) return;
  TORCH_CHECK(
      way.most_rows >= 1 && budget >= 0 && (budget == 0 || way.checkpointed) && (!way.checkpointed || !parts_.empty()),
      "FitMemory: a saved plan must have a budget for checkpointed parts where the model has such, got ", budget);
  go(way, settled);
  set_budget(budget);
}

}  // namespace gradaccum::detail
