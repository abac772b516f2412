// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/phases.hpp>

#include <cstdint>
#include <optional>

/// Learning rates as pure functions of the update's index, which is 0 for the first update.
namespace gradaccum::lr {

/// A constant learning rate after a linear warm-up.
///
///     ga::lr::Constant constant{.peak = 3e-4, .warmup = 100};
///     ga::LearningRates rates(optimizer);
///     rates.set(constant(optimizer.updates()));
///
/// The warm-up is linear, from `start` at update 0 to `peak` at update `warmup`. Throws `std::invalid_argument` for
/// members out of range and for a negative update.
struct Constant {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const {
    return detail::Phases{"lr::Constant", peak, warmup, start}.at(update, detail::linear_decay);
  }
};

}  // namespace gradaccum::lr
