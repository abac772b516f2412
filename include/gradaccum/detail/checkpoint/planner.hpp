// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/pareto_front.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// A dynamic programme over the parts of a chain: what the stages first..last can cost, from what fewer stages can.
///
/// The list of a part begins with its first stage, kept, or with a segment that is checkpointed. Then comes a list for
/// the rest, which has fewer bytes; and then, when the rest is done, the segment's own, which has all of them again.
///
/// This is rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains") with several ways to keep a stage,
/// and with Pareto fronts of exact bytes in place of a table of rounded ones. Long chains have long fronts: these are
/// thinned, which may miss a slightly faster schedule, but neither the budget nor the least memory.
class CheckpointPlanner {
 public:
  /// Of schedules within `budget` bytes. The front of a part has about `points` points. That of the chain from some
  /// stage to its end has more: these are few, and most of the bytes are shared out there.
  CheckpointPlanner(const StageCosts& stages, std::int64_t budget, std::size_t points);

  /// What the whole chain can cost; empty if no schedule is within the budget.
  const ParetoFront& front() const { return fronts_[stages_.size() - 1]; }

  /// The fastest list for the stages first..last within so many bytes, which must be enough.
  Schedule schedule(std::size_t first, std::size_t last, std::int64_t bytes) const;

 private:
  /// How a list can begin: with its first stage, kept in some way, or with a segment.
  struct Beginning {
    ItemCost step;
    std::size_t way, next;       // next: the first stage of the rest
    const ParetoFront* rest;     // needs its bytes beside step.held
    const ParetoFront* segment;  // recomputed after the rest
  };

  ParetoFront& front(std::size_t first, std::size_t last) { return fronts_[first * stages_.size() + last]; }
  const ParetoFront& front(std::size_t first, std::size_t last) const { return fronts_[first * stages_.size() + last]; }

  std::vector<Beginning> beginnings(std::size_t first, std::size_t last) const;
  void extend(ParetoFront& best, const Beginning& beginning) const;
  static Beginning fastest(const std::vector<Beginning>& all, std::int64_t bytes);

  const StageCosts& stages_;
  std::int64_t budget_;
  std::vector<ParetoFront> fronts_;             // by first and last stage
  const ParetoFront nothing_ = ParetoFront(1);  // no stages: no bytes, no time
};

/// The fewest bytes that a schedule can do with.
std::int64_t least_memory(const StageCosts& stages);

/// Plain training.
Schedule keep_everything(const StageCosts& stages);

/// The fastest schedule within `budget` bytes, at least `least_memory(stages)`; plain training if it is. O(n³) for n
/// stages: 10 ms for 24, 0.2 s for 100.
Schedule fastest_schedule(const StageCosts& stages, std::int64_t budget);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/planner.ipp>
#endif
