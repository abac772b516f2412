// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// Keys of the random numbers by which bfloat16 parameters are rounded: of the seed, of the parameter's place in the
/// optimizer, and of how often it has been stepped so. They do not depend on threads, nor on what else is stepped.
class StochasticRounding {
 public:
  void seed(std::uint64_t seed) { seed_ = seed; }
  bool is_on() const { return seed_.has_value(); }
  bool concerns(const at::Tensor& parameter) const { return seed_ && parameter.scalar_type() == at::kBFloat16; }

  /// For the next step of the optimizer's `place`-th parameter, which this concerns.
  std::uint64_t next_key(std::size_t place);

  /// How often each parameter has been stepped so. A state to be saved; the seed is the program's.
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
