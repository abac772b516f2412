// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
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
#include <gradaccum/impl/checkpoint/planner.ipp>
#endif
