// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Scatters the bits of a number over all 64: the last step of a generator that counts (SplitMix64).
inline std::uint64_t scattered(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Keys of the random numbers by which bfloat16 parameters are rounded: of the seed, of the parameter's place in the
/// optimizer, and of how often it has been stepped so. They do not depend on threads, nor on what else is stepped.
class StochasticRounding {
 public:
  void seed(std::uint64_t seed) { seed_ = seed; }
  bool concerns(const at::Tensor& parameter) const { return seed_ && parameter.scalar_type() == at::kBFloat16; }

  /// For the next step of this parameter, the optimizer's `place`-th; none where it is rounded to the nearest.
  std::optional<std::uint64_t> next_key(const at::Tensor& parameter, std::size_t place) {
    if (!concerns(parameter)) return {};
    if (steps_.size() <= place) steps_.resize(place + 1);
    return scattered(scattered(scattered(*seed_) + place) + static_cast<std::uint64_t>(steps_[place]++));
  }

  /// How often each parameter has been stepped so. A state to be saved; the seed is the program's.
  const std::vector<std::int64_t>& steps() const { return steps_; }
  std::int64_t steps_of(std::size_t place) const { return place < steps_.size() ? steps_[place] : 0; }
  void set_steps(std::vector<std::int64_t> steps) {
    for (auto count : steps) TORCH_CHECK(count >= 0, "stochastic_rounding: a step count must be >= 0, got ", count);
    steps_ = std::move(steps);
  }

 private:
  std::optional<std::uint64_t> seed_;
  std::vector<std::int64_t> steps_;
};

}  // namespace gradaccum::detail
