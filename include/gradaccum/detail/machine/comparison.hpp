// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <functional>

namespace gradaccum::detail {

/// Seconds that the same work takes, as it is and as it could be.
struct Comparison {
  double as_it_is = 0, at_best = 0;

  /// How many times slower it is; 1 where nothing is lost, and where these are no times.
  double loss() const;
};

/// What a stopwatch shows, in seconds.
using Clock = std::function<double()>;

/// The time that this thread has had of a processor: nobody else's work is in it.
double thread_seconds();

/// The time on the wall, for work that several threads share.
double wall_seconds();

/// The least time of several, within some tenth of a second.
double least_seconds(const Clock& clock, const std::function<void()>& work);

/// The least time of each, some tenth of a second for both in turn: what else the machine does can only add to a time.
Comparison compare(const Clock& clock, const std::function<void()>& as_it_is, const std::function<void()>& at_best);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/comparison.ipp>
#endif
