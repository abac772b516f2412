// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/pareto_front.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// The measured cost of a stage of a chain, in bytes and seconds. The stage's input counts where it is kept.
struct StageCost {
  /// One way to keep the tensors that backward needs.
  struct Way {
    std::int64_t held = 0;           ///< kept after forward, including the output
    std::int64_t forward_peak = 0;   ///< peak of that forward pass
    std::int64_t backward_peak = 0;  ///< peak of its backward pass, including `held` and both gradients
    std::int64_t again_peak = 0;     ///< peak of both passes when recomputed as a segment's last stage
    double backward_seconds = 0;
    double again_seconds = 0;  ///< forward as a segment's last stage, which stops at the last saved tensor
  };
  double forward_seconds = 0;
  std::int64_t output = 0;           ///< kept while it is a segment's input: a checkpoint
  std::int64_t forward_peak = 0;     ///< peak of a forward pass that keeps nothing, including the output
  std::int64_t output_gradient = 0;  ///< alive while a segment that ends with this stage is recomputed
  std::vector<Way> ways;             ///< at least one: the first keeps everything, others keep less and compute more
};
using StageCosts = std::vector<StageCost>;

/// One step of a schedule: a stage that keeps what its backward pass needs, or a checkpointed segment.
struct ScheduleItem {
  std::size_t stage = 0, way = 0;
  /// The list of a segment; empty for a stage. The segment's stages keep nothing at first. When their backward is due,
  /// they are rerun from the segment's input by this list.
  std::vector<ScheduleItem> segment;
};

/// A list of items for successive stages. The last item is a stage: a segment there would be recomputed at once.
using Schedule = std::vector<ScheduleItem>;

/// The cost of one item, without the items after it and without a segment's recomputation.
struct ItemCost {
  Cost cost;
  std::int64_t held = 0;  ///< bytes kept while the items after it run, forward and backward
};

/// Bytes of the gradient that is alive while a list that ends with stage `last` runs forward. 0 for the whole chain,
/// since the loss has no gradient yet.
std::int64_t gradient_alive(const StageCosts& stages, std::size_t last);

/// The cost of keeping a stage in `way`, in a list that ends with stage `last`.
ItemCost keep(const StageCosts& stages, std::size_t stage, std::size_t way, std::size_t last);

/// Adds a stage to a segment's first forward pass, while `gradient` bytes are alive. Only the segment's input is kept,
/// and it does not count. The output of each stage lives until the next stage has its own.
void drop(ItemCost& segment, const StageCost& stage, std::int64_t gradient);

/// The cost of a schedule, or of recomputing a segment by its list and running it backward.
Cost cost_of(const Schedule& schedule, const StageCosts& stages);
inline std::int64_t peak_bytes(const Schedule& schedule, const StageCosts& stages) {
  return cost_of(schedule, stages).peak;
}
inline double seconds(const Schedule& schedule, const StageCosts& stages) { return cost_of(schedule, stages).seconds; }

/// Formats a schedule as `[0-2] 3 [[4 5] 6] 7-9*`, with stages by number or by name. `[...]` keeps only its input, and
/// is recomputed. `*` and `**` keep less, in the stage's second and third way.
std::string to_string(const Schedule& schedule, const std::vector<std::string>& names = {});

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/schedule.ipp>
#endif
