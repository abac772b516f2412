// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace gradaccum::detail {

/// How a rate falls from 1 to 0 when `done` of `length` updates are over. The expressions are Python's, to the bit.
inline double linear_decay(double done, double length) { return (length - done) / length; }
inline double cosine_decay(double done, double length) {
  return 0.5 * (1 + std::cos(std::numbers::pi * (done / length)));
}
inline double one_minus_sqrt_decay(double done, double length) { return 1 - std::sqrt(done / length); }

/// What all learning rates are: a warm-up to `peak`, a plateau, and a decay over the last updates of `total`.
///
/// The members are checked at every call: the classes are aggregates, which have no constructor.
struct Phases {
  static constexpr std::int64_t no_end = std::numeric_limits<std::int64_t>::max();

  const char* owner;  // for errors
  double peak;
  std::int64_t warmup;
  std::optional<double> start;
  std::int64_t total = no_end;
  double end = peak;
  std::optional<std::int64_t> decay = {};  // updates; by default all that follow the warm-up

  double at(std::int64_t update, double (*falling)(double, double)) const {
    check(update);
    if (update >= total) return end;
    if (update < warmup) return std::lerp(first(), peak, static_cast<double>(update) / static_cast<double>(warmup));
    const auto length = decay.value_or(total - warmup), done = update - (total - length);
    return done <= 0 ? peak : std::lerp(end, peak, falling(static_cast<double>(done), static_cast<double>(length)));
  }

 private:
  /// By default the line that would have been 0 one update before: a first update at 0 would move nothing.
  double first() const { return start.value_or(peak / (static_cast<double>(warmup) + 1)); }

  void check(std::int64_t update) const {
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

  template <class Value>
  void require(bool holds, const char* requirement, Value got) const {
    if (holds) return;
    std::ostringstream message;
    message << owner << ": " << requirement << ", got " << got;
    throw std::invalid_argument(message.str());
  }
};

}  // namespace gradaccum::detail
