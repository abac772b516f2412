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
  if (found_) return;
  std::vector<std::shared_ptr<CheckpointedSequentialImpl>> parts;
  for (auto& part : more) {
    TORCH_CHECK(part->options().segments == 0, "FitMemory: checkpointed parts must have a memory_budget, got segments");
    parts.push_back(part.ptr());
  }
  const auto add = [&](std::shared_ptr<CheckpointedSequentialImpl> part) {
    const bool is_new = part && part->options().memory_budget > 0 && std::ranges::find(parts, part) == parts.end();
    if (is_new) parts.push_back(std::move(part));
  };
  add({std::shared_ptr<void>(), dynamic_cast<CheckpointedSequentialImpl*>(&module)});  // without ownership
  for (auto& part : module.modules(/*include_self=*/false))
    add(std::dynamic_pointer_cast<CheckpointedSequentialImpl>(part));
  parts_ = std::move(parts);
  for (auto& part : parts_) part->set_memory_budget(0);
  found_ = true;
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
  for (auto& part : parts_)
    if (way_.checkpointed && part->has_plan()) all += part->plan().predicted.peak_bytes;
  return all;
}

GRADACCUM_INLINE void CheckpointSearch::took(std::int64_t elements, double seconds, bool left) {
  constexpr int enough = 3;  // the fastest of this many counts
  if (!searches() || !(left || way_.checkpointed)) return;
  seconds_ = std::min(seconds_, seconds / static_cast<double>(elements));
  if (++timed_ < enough) return;
  const bool faster = seconds_ < 0.98 * best_seconds_;
  if (faster) best_ = way_, best_seconds_ = seconds_;
  const bool may_grow = left && (elements > way_.most / 2 || !way_.checkpointed);
  if (faster && may_grow)
    go({/*checkpointed=*/true, 2 * elements}, /*settled=*/false);
  else
    go(best_, /*settled=*/true);
}

GRADACCUM_INLINE bool CheckpointSearch::fails(std::int64_t over) {
  if (parts_.empty()) return false;
  if (!way_.checkpointed || !settled_) {
    go(way_.checkpointed ? best_ : Way{/*checkpointed=*/true}, /*settled=*/true);
    return true;
  }
  const auto less = budget_ - (over + over / 8) / static_cast<std::int64_t>(parts_.size()) - 1;
  if (over <= 0 || less <= 0) return false;
  set_budget(less);
  return true;
}

GRADACCUM_INLINE void CheckpointSearch::go(const Way& way, bool settled) {
  seconds_ = std::numeric_limits<double>::infinity();
  timed_ = 0;
  settled_ = settled;
  way_ = way;
  if (!way_.checkpointed) set_budget(0);
}

GRADACCUM_INLINE void CheckpointSearch::state(Archive& archive) {
  auto way = way_;
  auto settled = settled_;
  auto budget = budget_;
  archive("checkpointed", way.checkpointed);
  archive("most", way.most);
  archive("settled", settled);
  archive("checkpoint_budget", budget);
  archive("best_checkpointed", best_.checkpointed);
  archive("best_most", best_.most);
  archive("best_seconds", best_seconds_);
  if (!archive.loading()) return;
  TORCH_CHECK(
      way.most >= 1 && budget >= 0 && (budget == 0 || way.checkpointed) && (!way.checkpointed || !parts_.empty()),
      "FitMemory: a saved plan must have a budget for checkpointed parts where the model has such, got ", budget);
  go(way, settled);
  set_budget(budget);
}

}  // namespace gradaccum::detail
