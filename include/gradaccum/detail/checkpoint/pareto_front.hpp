// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// The most bytes alive at once, and the time.
struct Cost {
  std::int64_t peak = 0;
  double seconds = 0;
};

/// What something can cost: the more bytes, the fewer seconds. Sorted; each point is faster than all before it.
using ParetoFront = std::vector<Cost>;

/// Faster by more than what the rounding of sums can do.
inline bool is_faster(double seconds, double than) { return seconds < than * (1 - 1e-12); }

/// Points are added in the order of their peaks.
void add(ParetoFront& front, const Cost& point);

/// What is cheapest of both.
ParetoFront merged(const ParetoFront& one, const ParetoFront& other);

/// The fastest point of each of `shares` equal shares of the bytes; and the first point: what is possible stays so.
ParetoFront thinned(const ParetoFront& front, std::size_t shares);

/// Infinity if so few bytes do not do.
double fastest_within(std::int64_t bytes, const ParetoFront& front);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/pareto_front.ipp>
#endif
