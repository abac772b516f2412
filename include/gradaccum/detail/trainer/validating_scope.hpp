// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policies/ema.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
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

/// Before the first update the averages would be the weights as they are.
inline ValidatingScope::ValidatingScope(torch::nn::Module& module, Ema* averages)
    : module_(module),
      averages_(averages && averages->updates() > 0 ? averages : nullptr),
      generators_(states_of_generators()) {
  if (averages_) averages_->swap(module_);
}

inline ValidatingScope::~ValidatingScope() {
  if (averages_) averages_->swap(module_);
  set_generators(generators_);
}

inline void check_when(std::optional<std::int64_t> every_updates, std::optional<std::int64_t> every_epochs,
                       const std::string& name) {
  TORCH_CHECK(every_updates.value_or(1) >= 1, "Validate: every_updates must be >= 1, got ", *every_updates);
  TORCH_CHECK(every_epochs.value_or(1) >= 1, "Validate: every_epochs must be >= 1, got ", *every_epochs);
  TORCH_CHECK(!name.empty() && name.find('/') == name.npos, "Validate: name must be a text without '/', got '", name,
              "'");
}

inline bool knows(const std::vector<Validation>& validations, const std::string& name, std::int64_t update) {
  return std::any_of(validations.rbegin(), validations.rend(),
                     [&](const Validation& one) { return one.name == name && one.update == update; });
}

}  // namespace gradaccum::detail
