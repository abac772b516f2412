// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/profile_report.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// The time since construction, by phase. Each moment counts for the innermost open phase, or for "other" without one.
class PhaseTimes {
 public:
  void enter(const std::string& name);
  void leave();
  bool in_phase() const { return !open_.empty(); }

  /// Returns the times up to now. Shares are fractions of the total time.
  std::vector<ProfiledPhase> phases();

 private:
  using Clock = std::chrono::steady_clock;
  struct Phase {
    std::string name;
    std::int64_t times = 0;
    Clock::duration time = {};
  };

  void count();
  std::size_t place_of(const std::string& name);

  std::vector<Phase> phases_;
  std::vector<std::size_t> open_;  // indices of phases, the innermost last
  Phase other_{"other"};
  Clock::time_point counted_ = Clock::now();
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/phase_times.ipp>
#endif
