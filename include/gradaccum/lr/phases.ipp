// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/lr/phases.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cmath>
#include <numbers>
#include <sstream>
#include <stdexcept>

namespace gradaccum::detail {

GRADACCUM_INLINE double linear_decay(double done, double length) { return (length - done) / length; }
GRADACCUM_INLINE double cosine_decay(double done, double length) {
  return 0.5 * (1 + std::cos(std::numbers::pi * (done / length)));
}
GRADACCUM_INLINE double one_minus_sqrt_decay(double done, double length) { return 1 - std::sqrt(done / length); }

GRADACCUM_INLINE double Phases::at(std::int64_t update, double (*falling)(double, double)) const {
  check(update);
  if (update >= total) return end;
  if (update < warmup) return std::lerp(first(), peak, static_cast<double>(update) / static_cast<double>(warmup));
  const auto length = decay.value_or(total - warmup), done = update - (total - length);
  return done <= 0 ? peak : std::lerp(end, peak, falling(static_cast<double>(done), static_cast<double>(length)));
}

/// By default the warm-up line would be 0 at update -1, since a first update with rate 0 would change nothing.
GRADACCUM_INLINE double Phases::first() const { return start.value_or(peak / (static_cast<double>(warmup) + 1)); }

template <class Value>
void Phases::require(bool holds, const char* requirement, Value got) const {
  if (holds) return;
  std::ostringstream message;
  message << owner << ": " << requirement << ", got " << got;
  throw std::invalid_argument(message.str());
}

GRADACCUM_INLINE void Phases::check(std::int64_t update) const {
  require(std::isfinite(peak) && peak > 0, "peak must be finite and > 0", peak);
  require(total >= 1, "total must be >= 1", total);
  require(0 <= warmup && warmup <= total, total == no_end ? "warmup must be >= 0" : "warmup must be in [0, total]",
          warmup);
  require(!decay || (1 <= *decay && *decay <= total - warmup), "decay must be in [1, total - warmup]",
          decay.value_or(0));
  require(!start || (0 <= *start && *start <= peak), "start must be in [0, peak]", start.value_or(0));
  require(0 <= end && end <= peak, "end must be in [0, peak]; it is a rate, not a factor", end);
  require(update >= 0, "the update must be >= 0", update);
}

}  // namespace gradaccum::detail
