// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// The peak of bytes alive at once, and the time.
struct Cost {
  std::int64_t peak = 0;
  double seconds = 0;
};

/// Possible costs, sorted: each point has more bytes and takes fewer seconds than all before it.
using ParetoFront = std::vector<Cost>;

/// Returns whether `seconds` is less than `than` by more than rounding errors of sums.
inline bool is_faster(double seconds, double than) { return seconds < than * (1 - 1e-12); }

/// Adds a point if it is faster than the last. Points must come in the order of their peaks.
void add(ParetoFront& front, const Cost& point);

/// The Pareto front of the points of both.
ParetoFront merged(const ParetoFront& one, const ParetoFront& other);

/// Keeps the fastest point in each of `shares` equal ranges of bytes, and the first, which needs the least memory.
ParetoFront thinned(const ParetoFront& front, std::size_t shares);

/// The least seconds possible within `bytes`; infinity if no point fits.
double fastest_within(std::int64_t bytes, const ParetoFront& front);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/pareto_front.ipp>
#endif
