// SPDX-License-Identifier: Apache-2.0
// Checks the options of Validate, and swaps averaged weights into the model while it runs.
#pragma once

#include <gradaccum/policies/validate.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

GRADACCUM_INLINE void check_options(const ValidateOptions& options) {
  const auto& [every_updates, every_epochs, ema, name] = options;
  TORCH_CHECK(every_updates.value_or(1) >= 1, "Validate: every_updates must be >= 1, got ", *every_updates);
  TORCH_CHECK(every_epochs.value_or(1) >= 1, "Validate: every_epochs must be >= 1, got ", *every_epochs);
  TORCH_CHECK(!name.empty() && name.find('/') == name.npos, "Validate: name must not be empty or contain '/', got '",
              name, "'");
}

GRADACCUM_INLINE std::shared_ptr<void> validating_scope(torch::nn::Module& module, Ema::Running* ema) {
  // Before the first update, the averages equal the weights.
  if (ema && ema->updates() == 0) ema = nullptr;
  const auto generators = states_of_generators();
  if (ema) ema->swap(module);
  return {nullptr, [&module, ema, generators](void*) {
            if (ema) ema->swap(module);
            set_generators(generators);
          }};
}

}  // namespace detail

}  // namespace gradaccum

#undef GRADACCUM_INLINE
