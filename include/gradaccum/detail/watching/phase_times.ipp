// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/phase_times.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void PhaseTimes::enter(const std::string& name) {
  count();
  const auto place = place_of(name);
  ++phases_[place].times;
  open_.push_back(place);
}

GRADACCUM_INLINE void PhaseTimes::leave() {
  count();
  open_.pop_back();
}

GRADACCUM_INLINE void PhaseTimes::count() {
  const auto now = Clock::now();
  (open_.empty() ? other_ : phases_[open_.back()]).time += now - std::exchange(counted_, now);
}

GRADACCUM_INLINE std::size_t PhaseTimes::place_of(const std::string& name) {
  for (std::size_t place = 0; place < phases_.size(); ++place)
    if (phases_[place].name == name) return place;
  phases_.push_back({name});
  return phases_.size() - 1;
}

GRADACCUM_INLINE std::vector<ProfiledPhase> PhaseTimes::phases() {
  count();
  // A user's phase may have that name, too.
  auto all = phases_;
  std::size_t other = 0;
  while (other < all.size() && all[other].name != other_.name) ++other;
  if (other == all.size()) all.push_back({other_.name});
  all[other].time += other_.time;

  std::chrono::duration<double> whole{};
  for (auto& phase : all) whole += phase.time;
  std::vector<ProfiledPhase> result;
  for (auto& phase : all) {
    const std::chrono::duration<double> time = phase.time;
    result.push_back({phase.name, phase.times, time.count(), whole.count() > 0 ? time / whole : 0});
  }
  return result;
}

}  // namespace gradaccum::detail
