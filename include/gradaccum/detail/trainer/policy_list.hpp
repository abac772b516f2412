// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/any_policy.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gradaccum::detail {

/// The policies of a Trainer, whose hooks are called in their order.
class PolicyList {
 public:
  void add(std::unique_ptr<AnyPolicy> policy);
  AnyPolicy& operator[](std::size_t place) const { return *policies_[place]; }

  template <class... Parameters, class... Arguments>
  void all(void (AnyPolicy::*hook)(Parameters...), Arguments&&... arguments) {
    for (auto& policy : policies_) (policy.get()->*hook)(arguments...);
  }
  /// Begins with policies of several processes, after which the others may evaluate what is then the same on all.
  void processes_first(void (AnyPolicy::*hook)(std::int64_t), std::int64_t epoch);

  /// None that has a say is against it. All are asked, whatever the others say.
  bool ready();
  bool others_continue();

  /// The guards that this hook of all gives, which are let go with what this returns, the last one first.
  std::shared_ptr<void> scopes(std::shared_ptr<void> (AnyPolicy::*hook)(std::shared_ptr<void>)) const;

  /// Each under its name. If one cannot load, all are as before.
  void state(Archive& archive);
  /// Of those that see micro-batches.
  void state_in_window(Archive& archive);

 private:
  void go_back(const Archive& before);

  std::vector<std::unique_ptr<AnyPolicy>> policies_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/policy_list.ipp>
#endif
