// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/pareto_front.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Plans by dynamic programming: the possible costs of stages first..last follow from those of fewer stages.
///
/// The list of a part begins with its first stage, kept, or with a checkpointed segment. A list for the rest follows,
/// with fewer bytes. When the rest is done, the segment is recomputed by a list of its own, with all bytes again.
///
/// Implements rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains") with several ways to keep a
/// stage, and with Pareto fronts of exact bytes instead of a table of rounded ones. Long fronts are thinned, which may
/// miss a slightly faster schedule, but neither the budget nor the least memory.
class CheckpointPlanner {
 public:
  /// Plans schedules within `budget` bytes. The front of a part has about `points` points. Fronts of parts that end
  /// with the chain have more: they are few, and most of the bytes are divided there.
  CheckpointPlanner(const StageCosts& stages, std::int64_t budget, std::size_t points);

  /// Possible costs of the whole chain; empty if no schedule fits the budget.
  const ParetoFront& front() const { return fronts_[stages_.size() - 1]; }

  /// The fastest list for the stages first..last within `bytes`, which must suffice.
  Schedule schedule(std::size_t first, std::size_t last, std::int64_t bytes) const;

 private:
  /// A possible beginning of a list: its first stage, kept in some way, or a segment.
  struct Beginning {
    ItemCost step;
    std::size_t way, next;       // next: the first stage of the rest
    const ParetoFront* rest;     // its bytes come on top of step.held
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

/// The fewest bytes for which there is a schedule.
std::int64_t least_memory(const StageCosts& stages);

/// The schedule of plain training.
Schedule keep_everything(const StageCosts& stages);

/// The fastest schedule within `budget` bytes; plain training if it fits. Throws std::invalid_argument if `budget` is
/// less than `least_memory(stages)`. Takes O(n³) time for n stages: 10 ms for 24, 0.2 s for 100.
Schedule fastest_schedule(const StageCosts& stages, std::int64_t budget);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/planner.ipp>
#endif
