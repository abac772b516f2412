// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/validation.hpp>

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// While somebody evaluates in the middle of a training: the averages are in the model, if there are any, and random
/// numbers are afterwards as before.
class ValidatingScope {
 public:
  ValidatingScope(torch::nn::Module& module, Ema* averages);
  ValidatingScope(const ValidatingScope&) = delete;
  ValidatingScope& operator=(const ValidatingScope&) = delete;
  ~ValidatingScope();

 private:
  torch::nn::Module& module_;
  Ema* averages_;
  Archive::Tensors generators_;
};

/// The next loop over batches that know how is the first one again.
template <class Batches>
void begin_again(Batches& batches) {
  if constexpr (requires { batches.load_state(typename Batches::State()); })
    batches.load_state(typename Batches::State());
}

/// Throws what is wrong with the options of `Validate`.
void check_when(std::optional<std::int64_t> every_updates, std::optional<std::int64_t> every_epochs,
                const std::string& name);

/// There is one of that name at that update.
bool knows(const std::vector<Validation>& validations, const std::string& name, std::int64_t update);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/validating_scope.ipp>
#endif
