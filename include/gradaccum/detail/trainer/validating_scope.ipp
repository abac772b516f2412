// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/validating_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/generator_states.hpp>

#include <c10/util/Exception.h>

#include <algorithm>

namespace gradaccum::detail {

/// Before the first update the averages would be the weights as they are.
GRADACCUM_INLINE ValidatingScope::ValidatingScope(torch::nn::Module& module, Ema* averages)
    : module_(module),
      averages_(averages && averages->updates() > 0 ? averages : nullptr),
      generators_(states_of_generators()) {
  if (averages_) averages_->swap(module_);
}

GRADACCUM_INLINE ValidatingScope::~ValidatingScope() {
  if (averages_) averages_->swap(module_);
  set_generators(generators_);
}

GRADACCUM_INLINE void check_when(std::optional<std::int64_t> every_updates, std::optional<std::int64_t> every_epochs,
                                 const std::string& name) {
  TORCH_CHECK(every_updates.value_or(1) >= 1, "Validate: every_updates must be >= 1, got ", *every_updates);
  TORCH_CHECK(every_epochs.value_or(1) >= 1, "Validate: every_epochs must be >= 1, got ", *every_epochs);
  TORCH_CHECK(!name.empty() && name.find('/') == name.npos, "Validate: name must be a text without '/', got '", name,
              "'");
}

GRADACCUM_INLINE bool knows(const std::vector<Validation>& validations, const std::string& name, std::int64_t update) {
  return std::any_of(validations.rbegin(), validations.rend(),
                     [&](const Validation& one) { return one.name == name && one.update == update; });
}

}  // namespace gradaccum::detail
