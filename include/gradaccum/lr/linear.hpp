// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/phases.hpp>

#include <cstdint>
#include <optional>

namespace gradaccum::lr {

/// A linear warm-up, then a line from `peak` at update `warmup` down to `end` at update `total`, and `end` afterwards.
///
///     ga::lr::Linear linear{.peak = 3e-4, .warmup = 100, .total = 5000};
///     ga::LearningRates rates(optimizer);
///     rates.set(linear(optimizer.updates()));
///
/// The warm-up and the errors are those of `Constant`.
struct Linear {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates, at most `total`
  std::int64_t total = 0;            ///< updates, >= 1
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const {
    return detail::Phases{"lr::Linear", peak, warmup, start, total, end}.at(update, detail::linear_decay);
  }
};

}  // namespace gradaccum::lr
