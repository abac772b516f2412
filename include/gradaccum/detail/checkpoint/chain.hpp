// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The peak of bytes alive at once, and the time.
struct Cost {
  std::int64_t peak = 0;
  double seconds = 0;
};

/// Possible costs, sorted: each point has more bytes and takes fewer seconds than all before it.
using ParetoFront = std::vector<Cost>;

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

/// The cost of a schedule, or of recomputing a segment by its list and running it backward.
Cost cost_of(const Schedule& schedule, const StageCosts& stages);

/// Formats a schedule as `[0-2] 3 [[4 5] 6] 7-9*`, with stages by number. `[...]` keeps only its input, and is
/// recomputed. `*` and `**` keep less, in the stage's second and third way.
std::string to_string(const Schedule& schedule);

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

/// Successive modules of a chain that save tensors for backward in the same way and are recomputed together.
struct Stage {
  explicit Stage(torch::nn::AnyModule module) : parts{std::move(module)} {}

  /// Runs the modules. `way` 0 saves what LibTorch saves; `way` 1 recomputes results of cheap operations in backward.
  /// `context` is a second input of all modules, unless it is undefined.
  at::Tensor forward(std::size_t way, at::Tensor activations, const at::Tensor& context);

  /// Runs the modules inside a checkpoint. A recomputation updates copies of the running statistics. The copies are
  /// freed when the stage ends, so they count as its own memory.
  at::Tensor forward_in_checkpoint(std::size_t way, at::Tensor activations, const at::Tensor& context);

  std::vector<torch::nn::Module*> modules() const;

  std::vector<torch::nn::AnyModule> parts;
};

using Stages = std::vector<Stage>;

std::vector<torch::nn::Module*> modules_of(const Stages& stages);

/// A function of a tensor that runs successive stages of a chain by a schedule. Each segment of the schedule is such a
/// function, too, and is checkpointed: segments nest, and each is recomputed by its own part of the schedule.
struct Segment {
  at::Tensor operator()(at::Tensor activations) const;

  /// The modules whose running statistics a recomputation resets to those before the forward pass, since saved contents
  /// are compared. Empty without `check_content`: the stages then freeze their own statistics.
  std::vector<torch::nn::Module*> modules() const;

  /// The function of a segment of the schedule.
  Segment inside(const ScheduleItem& item) const { return {stages, {schedule, &item.segment}, options, context}; }

  std::shared_ptr<Stages> stages;
  std::shared_ptr<const Schedule> schedule;  // shares ownership of the whole schedule
  CheckpointOptions options;
  at::Tensor context = {};
};

/// Merges a stage into the previous one if neither saves the tensor between them, such as a linear layer and its
/// dropout: apart, that tensor would count although it is long freed. Also merges stages that change their input in
/// place, and stages before the first that needs gradients, since the input that a segment keeps counts where an
/// operation needs it.
Stages merged(const Stages& stages, const at::Tensor& input, const at::Tensor& context = {});

/// Measures the cost of each stage for inputs like this one, by running it a few times. Leaves gradients of parameters
/// unchanged; the caller restores random generators and running statistics.
StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options,
                    const at::Tensor& context = {});

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/planner.ipp>
#endif
