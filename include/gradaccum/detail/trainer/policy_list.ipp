// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/policy_list.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void PolicyList::add(std::unique_ptr<AnyPolicy> policy) { policies_.push_back(std::move(policy)); }

GRADACCUM_INLINE std::vector<std::size_t> PolicyList::processes_first() const {
  std::vector<std::size_t> places;
  for (const bool of_processes : {true, false})
    for (std::size_t i = 0; i < policies_.size(); ++i)
      if (policies_[i]->of_processes() == of_processes) places.push_back(i);
  return places;
}

GRADACCUM_INLINE bool PolicyList::ready() {
  bool all = true;
  for (auto& policy : policies_) all = policy->ready() && all;
  return all;
}

GRADACCUM_INLINE bool PolicyList::others_continue() {
  bool any = false;
  for (auto& policy : policies_) any = policy->others_continue() || any;
  return any;
}

GRADACCUM_INLINE void PolicyList::in_scopes(void (AnyPolicy::*scope)(Work), Work work, std::size_t first) {
  if (first == policies_.size()) return work();
  (policies_[first].get()->*scope)([&] { in_scopes(scope, work, first + 1); });
}

GRADACCUM_INLINE void PolicyList::state(Archive& archive) {
  if (archive.loading()) {
    auto before = Archive::of_references();
    all(&AnyPolicy::state, before);
    archive.if_not_all_fit([this, before] { go_back(before); });
  }
  all(&AnyPolicy::state, archive);
}

GRADACCUM_INLINE void PolicyList::state_in_window(Archive& archive) {
  for (auto& policy : policies_)
    if (policy->sees_micro_batches()) policy->state(archive);
}

GRADACCUM_INLINE void PolicyList::go_back(const Archive& before) {
  auto archive = Archive::to_go_back(before);
  try {
    all(&AnyPolicy::state, archive);
  } catch (...) {  // one that never loads: those before it are back, those after it have not changed
  }
}

}  // namespace gradaccum::detail
