// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/pareto_front.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What one stage of a chain costs, as measured, in bytes and seconds. Its input never counts: whoever keeps it, pays.
struct StageCost {
  /// One way to keep what the backward pass needs.
  struct Way {
    std::int64_t held = 0;           ///< kept after the forward pass, the output included
    std::int64_t forward_peak = 0;   ///< the most during that forward pass
    std::int64_t backward_peak = 0;  ///< the most during its backward pass: what is held, and both gradients, included
    std::int64_t again_peak = 0;     ///< the most of both, recomputed as the last stage of a segment
    double backward_seconds = 0;
    double again_seconds =
        0;  ///< of the forward pass as the last stage of a segment: it stops at the last saved tensor
  };
  double forward_seconds = 0;
  std::int64_t output = 0;           ///< kept while it is the input of a segment: a checkpoint
  std::int64_t forward_peak = 0;     ///< the most during a forward pass that keeps nothing, the output included
  std::int64_t output_gradient = 0;  ///< alive while a segment that ends with this stage is recomputed
  std::vector<Way> ways;             ///< at least one: the first keeps everything, others keep less and work more
};
using StageCosts = std::vector<StageCost>;

/// One step of a schedule: a stage that keeps what its backward pass needs, or a checkpointed segment.
struct ScheduleItem {
  std::size_t stage = 0, way = 0;
  /// Not empty: a segment. Its stages keep nothing at first; once their backward pass is due, they are run again, from
  /// the segment's input, as this list says.
  std::vector<ScheduleItem> segment;
};

/// A list of items for successive stages. The last item is a stage: a segment there would be recomputed at once.
using Schedule = std::vector<ScheduleItem>;

/// An item of a list, without what comes after it and without a segment's recomputation.
struct ItemCost {
  Cost cost;
  std::int64_t held = 0;  ///< while the items after it run, forward and backward
};

/// The gradient that is alive while the list which ends with stage `last` runs forward. The whole chain's ends with the
/// loss, and there is none yet.
std::int64_t gradient_alive(const StageCosts& stages, std::size_t last);

/// A stage of the list which ends with stage `last` is kept.
ItemCost keep(const StageCosts& stages, std::size_t stage, std::size_t way, std::size_t last);

/// One more stage at the end of a segment's first forward pass, while `gradient` bytes are alive: only the segment's
/// input is kept, and it is not counted; the output of each later stage is there until the next one has its own.
void drop(ItemCost& segment, const StageCost& stage, std::int64_t gradient);

/// What a schedule costs, or the recomputation and backward pass of a segment by its list.
Cost cost_of(const Schedule& schedule, const StageCosts& stages);
inline std::int64_t peak_bytes(const Schedule& schedule, const StageCosts& stages) {
  return cost_of(schedule, stages).peak;
}
inline double seconds(const Schedule& schedule, const StageCosts& stages) { return cost_of(schedule, stages).seconds; }

/// `[0-2] 3 [[4 5] 6] 7-9*`: stages by number, or by name. `[...]`: keeps only its input, and is recomputed. `*`, `**`:
/// keeps less, in the stage's second, third way.
std::string to_string(const Schedule& schedule, const std::vector<std::string>& names = {});

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/schedule.ipp>
#endif
