// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/policy_list.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void PolicyList::add(std::unique_ptr<AnyPolicy> policy) { policies_.push_back(std::move(policy)); }

GRADACCUM_INLINE void PolicyList::processes_first(void (AnyPolicy::*hook)(std::int64_t), std::int64_t epoch) {
  for (const bool of_processes : {true, false})
    for (auto& policy : policies_)
      if (policy->of_processes() == of_processes) (policy.get()->*hook)(epoch);
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

GRADACCUM_INLINE std::shared_ptr<void> PolicyList::scopes(
    std::shared_ptr<void> (AnyPolicy::*hook)(std::shared_ptr<void>)) const {
  std::shared_ptr<void> scopes;
  for (auto& policy : policies_) scopes = (policy.get()->*hook)(std::move(scopes));
  return scopes;
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
