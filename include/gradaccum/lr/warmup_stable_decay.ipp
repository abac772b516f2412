// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/warmup_stable_decay.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/lr/phases.hpp>

namespace gradaccum::lr {

GRADACCUM_INLINE double WarmupStableDecay::operator()(std::int64_t update) const {
  const detail::Phases phases{"lr::WarmupStableDecay", peak, warmup, start, total, end, decay};
  if (shape == Decay::linear) return phases.at(update, detail::linear_decay);
  if (shape == Decay::cosine) return phases.at(update, detail::cosine_decay);
  return phases.at(update, detail::one_minus_sqrt_decay);
}

}  // namespace gradaccum::lr
