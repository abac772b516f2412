// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/phases.hpp>

#include <cstdint>
#include <optional>

namespace gradaccum::lr {

/// A linear warm-up, then half a cosine from `peak` at update `warmup` down to `end` at update `total`, then `end`.
///
///     ga::lr::Cosine cosine{.peak = 3e-4, .warmup = 100, .total = 5000, .end = 3e-5};
///     ga::LearningRates rates(optimizer);
///     rates.set(cosine(optimizer.updates()));
///
/// The warm-up and the errors are those of `Constant`.
struct Cosine {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates, at most `total`
  std::int64_t total = 0;            ///< updates, >= 1
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)

  double operator()(std::int64_t update) const {
    return detail::Phases{"lr::Cosine", peak, warmup, start, total, end}.at(update, detail::cosine_decay);
  }
};

}  // namespace gradaccum::lr
