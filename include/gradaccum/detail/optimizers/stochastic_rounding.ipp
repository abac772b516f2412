// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/stochastic_rounding.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum::detail {

/// Mixes a number's bits into all 64, as the SplitMix64 generator does.
GRADACCUM_INLINE std::uint64_t scattered(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

GRADACCUM_INLINE std::uint64_t StochasticRounding::next_key(std::size_t place) {
  if (steps_.size() <= place) steps_.resize(place + 1);
  return scattered(scattered(scattered(*seed_) + place) + static_cast<std::uint64_t>(steps_[place]++));
}

GRADACCUM_INLINE void StochasticRounding::set_steps(std::vector<std::int64_t> steps) {
  for (auto count : steps) TORCH_CHECK(count >= 0, "stochastic_rounding: a step count must be >= 0, got ", count);
  steps_ = std::move(steps);
}

}  // namespace gradaccum::detail
