// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// The keys of the random numbers that round bfloat16 parameters. They depend on the seed, the parameter's index in the
/// optimizer and the number of its rounded steps, but not on threads or other parameters.
class StochasticRounding {
 public:
  void seed(std::uint64_t seed) { seed_ = seed; }
  bool is_on() const { return seed_.has_value(); }
  bool concerns(const at::Tensor& parameter) const { return seed_ && parameter.scalar_type() == at::kBFloat16; }

  /// Returns the key for the next step of the `place`-th parameter, and counts the step. Requires `concerns`.
  std::uint64_t next_key(std::size_t place);

  /// The number of rounded steps of each parameter. This is state to save; the seed is set by the program.
  const std::vector<std::int64_t>& steps() const { return steps_; }
  std::int64_t steps_of(std::size_t place) const { return place < steps_.size() ? steps_[place] : 0; }
  void set_steps(std::vector<std::int64_t> steps);

 private:
  std::optional<std::uint64_t> seed_;
  std::vector<std::int64_t> steps_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/stochastic_rounding.ipp>
#endif
