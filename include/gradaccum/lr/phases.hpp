// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <limits>
#include <optional>

namespace gradaccum::detail {

/// Returns the factor, falling from 1 to 0, after `done` of `length` updates. Equals Python's expressions bit for bit.
double linear_decay(double done, double length);
double cosine_decay(double done, double length);
double one_minus_sqrt_decay(double done, double length);

/// The common form of all learning rates: a warm-up to `peak`, a plateau, and a decay over the last updates of `total`.
///
/// Members are checked at every call, since the classes are aggregates without constructors.
struct Phases {
  static constexpr std::int64_t no_end = std::numeric_limits<std::int64_t>::max();

  const char* owner;  // for errors
  double peak;
  std::int64_t warmup;
  std::optional<double> start;
  std::int64_t total = no_end;
  double end = peak;
  std::optional<std::int64_t> decay = {};  // updates; by default all after the warm-up

  double at(std::int64_t update, double (*falling)(double, double)) const;

 private:
  double first() const;
  void check(std::int64_t update) const;
  template <class Value>
  void require(bool holds, const char* requirement, Value got) const;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/lr/phases.ipp>
#endif
