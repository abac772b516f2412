// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/phases.hpp>

#include <cstdint>
#include <optional>

namespace gradaccum::lr {

/// The shape of the decay in `WarmupStableDecay`: `linear`, `cosine`, or `one_minus_sqrt`, which falls fast at first.
enum class Decay { linear, cosine, one_minus_sqrt };

/// A linear warm-up, `peak` for most of the run, and a decay to `end` over the last `decay` updates of `total`.
///
///     ga::lr::WarmupStableDecay wsd{.peak = 3e-4, .warmup = 100, .total = 5000, .decay = 500};
///     ga::LearningRates rates(optimizer);
///     rates.set(wsd(optimizer.updates()));
///
/// The rate before the decay does not depend on `total`, so a run can be extended. The warm-up and the errors are those
/// of `Constant`.
struct WarmupStableDecay {
  double peak = 0;                   ///< > 0
  std::int64_t warmup = 0;           ///< updates
  std::int64_t total = 0;            ///< updates, >= 1
  std::int64_t decay = 0;            ///< updates, in [1, total - warmup]
  double end = 0;                    ///< the rate from update `total` on, in [0, peak]
  std::optional<double> start = {};  ///< the rate of update 0, in [0, peak]; by default peak / (warmup + 1)
  Decay shape = Decay::cosine;

  double operator()(std::int64_t update) const;
};

}  // namespace gradaccum::lr

#ifndef GRADACCUM_COMPILED
#include <gradaccum/lr/warmup_stable_decay.ipp>
#endif
