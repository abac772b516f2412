// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/learning_rates.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace gradaccum {

GRADACCUM_INLINE LearningRates::LearningRates(Groups groups) : groups_(std::move(groups)) {
  first_ = rate_of(this->groups()[0].options());
  follow();
}

GRADACCUM_INLINE std::vector<torch::optim::OptimizerParamGroup>& LearningRates::groups() const {
  auto& groups = groups_();
  TORCH_CHECK(!groups.empty(), "LearningRates: the optimizer must have a parameter group");
  return groups;
}

GRADACCUM_INLINE double LearningRates::current() const { return groups()[0].options().get_lr(); }

/// Checks that the options can get and set their rate: LibTorch's own can, but their base class throws.
GRADACCUM_INLINE double LearningRates::rate_of(torch::optim::OptimizerOptions& options) {
  double rate = 0;
  try {
    rate = options.get_lr();
    options.set_lr(rate);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "LearningRates: ", detail::type_name(options), " must override get_lr() and set_lr()");
  }
  TORCH_CHECK(std::isfinite(rate) && rate >= 0, "LearningRates: a group's rate must be finite and >= 0, got ", rate);
  return rate;
}

/// Computes the ratios of new groups.
GRADACCUM_INLINE void LearningRates::follow() {
  auto& groups = this->groups();
  auto ratios = ratios_;
  ratios.resize(std::min(ratios.size(), groups.size()));
  for (auto i = ratios.size(); i < groups.size(); ++i) {
    const auto rate = rate_of(groups[i].options());
    TORCH_CHECK(first_ > 0 || rate == 0, "LearningRates: the first group's rate must be > 0 where another's is, got 0 ",
                "and ", rate, "; the groups keep the ratios to the first");
    ratios.push_back(rate == first_ ? 1 : rate / first_);
  }
  ratios_ = std::move(ratios);
}

GRADACCUM_INLINE void LearningRates::set(double rate) {
  TORCH_CHECK(std::isfinite(rate) && rate >= 0, "LearningRates: a rate must be finite and >= 0, got ", rate);
  follow();
  for (auto ratio : ratios_)
    TORCH_CHECK(std::isfinite(rate * ratio), "LearningRates: a group's rate must be finite, got ", rate, " * ", ratio);
  for (std::size_t i = 0; i < ratios_.size(); ++i) groups()[i].options().set_lr(rate * ratios_[i]);
}

}  // namespace gradaccum
