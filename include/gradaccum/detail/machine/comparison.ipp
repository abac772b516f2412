// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/comparison.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace gradaccum::detail {

GRADACCUM_INLINE double Comparison::loss() const {
  const double ratio = as_it_is / at_best;
  return std::isfinite(ratio) ? std::max(1.0, ratio) : 1;
}

GRADACCUM_INLINE double thread_seconds() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec now{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0)
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
#endif
  return wall_seconds();
}

GRADACCUM_INLINE double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

GRADACCUM_INLINE double seconds_of(const Clock& clock, const std::function<void()>& work) {
  const double start = clock();
  work();
  return clock() - start;
}

/// For some tenth of a second. The first time of a work is not for here: it pays for what is made once.
GRADACCUM_INLINE void measured_rounds(const Clock& clock, const std::function<void()>& round) {
  constexpr int least = 3, most = 100;
  constexpr double patience = 0.1;
  const double start = clock();
  for (int done = 0; done < most && (done < least || clock() - start < patience); ++done) round();
}

GRADACCUM_INLINE double least_seconds(const Clock& clock, const std::function<void()>& work) {
  double least = HUGE_VAL;
  work();
  measured_rounds(clock, [&] { least = std::min(least, seconds_of(clock, work)); });
  return least;
}

GRADACCUM_INLINE Comparison compare(const Clock& clock, const std::function<void()>& as_it_is,
                                    const std::function<void()>& at_best) {
  Comparison least{HUGE_VAL, HUGE_VAL};
  as_it_is();
  at_best();
  measured_rounds(clock, [&] {
    least.as_it_is = std::min(least.as_it_is, seconds_of(clock, as_it_is));
    least.at_best = std::min(least.at_best, seconds_of(clock, at_best));
  });
  return least;
}

}  // namespace gradaccum::detail
