// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The peak of live bytes, and the time.
struct Cost {
  std::int64_t peak = 0;
  double seconds = 0;
};

/// Possible costs, sorted: each point has more bytes and takes fewer seconds than all before it.
using ParetoFront = std::vector<Cost>;

/// Returns whether `seconds` is less than `than` by more than rounding errors of sums.
inline bool is_faster(double seconds, double than) { return seconds < than * (1 - 1e-12); }

/// Adds a point if it is faster than the last. Points must come in the order of their peaks.
inline void add(ParetoFront& front, const Cost& point) {
  if (!front.empty() && !is_faster(point.seconds, front.back().seconds)) return;
  if (!front.empty() && front.back().peak == point.peak) front.pop_back();
  front.push_back(point);
}

/// The Pareto front of the points of both.
inline ParetoFront merged(const ParetoFront& one, const ParetoFront& other) {
  ParetoFront both(one.size() + other.size()), front;
  std::ranges::merge(one, other, both.begin(), {}, &Cost::peak, &Cost::peak);
  for (const auto& point : both) add(front, point);
  return front;
}

/// Keeps the fastest point in each of `shares` equal ranges of bytes, and the first, which needs the least memory.
inline ParetoFront thinned(const ParetoFront& front, std::size_t shares) {
  if (front.size() <= shares) return front;
  const auto least = front.front().peak, width = (front.back().peak - least) / static_cast<std::int64_t>(shares) + 1;
  const auto share = [&](std::size_t point) { return (front[point].peak - least) / width; };
  ParetoFront thin{front.front()};
  for (std::size_t point = 1; point < front.size(); ++point)
    if (point + 1 == front.size() || share(point) != share(point + 1)) thin.push_back(front[point]);
  return thin;
}

/// The least seconds possible within `bytes`; infinity if no point fits.
inline double fastest_within(std::int64_t bytes, const ParetoFront& front) {
  const auto beyond = std::ranges::upper_bound(front, bytes, {}, &Cost::peak);
  return beyond == front.begin() ? std::numeric_limits<double>::infinity() : (beyond - 1)->seconds;
}

/// The measured cost of a stage of a chain, in bytes and seconds. The stage's input counts if the stage keeps it.
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
  std::int64_t buffers = 0;          ///< values of changed buffers, which a segment keeps
  std::int64_t copies = 0;           ///< copies of changed buffers that a segment is recomputed with
  std::vector<Way> ways;             ///< at least one: the first keeps everything, others keep less and compute more
};
using StageCosts = std::vector<StageCost>;

/// One step of a schedule: a stage that keeps what its backward pass needs, or a checkpointed segment.
struct ScheduleItem {
  std::size_t stage = 0, way = 0;
  /// The list by which a segment, which keeps nothing but its input, is rerun for its backward; empty for a stage.
  std::vector<ScheduleItem> segment;
};

/// A list of items for successive stages. The last item is a stage: a segment there would be recomputed immediately.
using Schedule = std::vector<ScheduleItem>;

/// The cost of one item, without the items after it and without a segment's recomputation.
struct ItemCost {
  Cost cost;
  std::int64_t held = 0;     ///< bytes kept while the items after it run, forward and backward
  std::int64_t buffers = 0;  ///< bytes of buffers among them, for the segment's recomputation
  std::int64_t again = 0;    ///< bytes that the segment's recomputation takes on top of its list
};

/// Bytes of the gradient that is alive while a list that ends with stage `last` runs forward: none before the loss.
inline std::int64_t gradient_alive(const StageCosts& stages, std::size_t last) {
  return last + 1 == stages.size() ? 0 : stages[last].output_gradient;
}

/// The cost of keeping a stage in `way`, in a list that ends with stage `last`.
inline ItemCost keep(const StageCosts& stages, std::size_t stage, std::size_t way, std::size_t last) {
  const auto& kept = stages[stage].ways[way];
  const bool stops_early = stage == last && last + 1 < stages.size();
  if (stops_early) return {{kept.again_peak, kept.again_seconds + kept.backward_seconds}, kept.held};
  const auto peak = std::max(gradient_alive(stages, last) + kept.forward_peak, kept.backward_peak);
  return {{peak, stages[stage].forward_seconds + kept.backward_seconds}, kept.held};
}

/// Adds a stage to a segment's first forward pass, while `gradient` bytes are alive. Keeps only the segment's input,
/// which does not count, and earlier values of buffers. A stage's output lives until the next stage has its own.
inline void drop(ItemCost& segment, const StageCost& stage, std::int64_t gradient) {
  segment.cost.peak = std::max(segment.cost.peak, gradient + segment.held + stage.forward_peak);
  segment.cost.seconds += stage.forward_seconds;
  segment.buffers += stage.buffers;
  segment.again += stage.buffers + stage.copies;
  segment.held = stage.output + segment.buffers;
}

inline std::size_t first_stage(const ScheduleItem& item) {
  return item.segment.empty() ? item.stage : first_stage(item.segment.front());
}

/// The cost of a schedule, or of recomputing a segment by its list and running it backward.
inline Cost cost_of(const Schedule& schedule, const StageCosts& stages) {
  Cost all;
  std::int64_t held = 0;
  for (const auto& item : schedule) {
    ItemCost step;
    if (item.segment.empty()) {
      step = keep(stages, item.stage, item.way, schedule.back().stage);
    } else {
      for (auto stage = first_stage(item); stage <= item.segment.back().stage; ++stage)
        drop(step, stages[stage], gradient_alive(stages, schedule.back().stage));
      const auto again = cost_of(item.segment, stages);
      step.cost = {std::max(step.cost.peak, step.again + again.peak), step.cost.seconds + again.seconds};
    }
    all = {std::max(all.peak, held + step.cost.peak), all.seconds + step.cost.seconds};
    held += step.held;
  }
  return all;
}

/// Formats a schedule as `[0-2] 3 [[4 5] 6] 7-9*`, with stages by number. `[...]` keeps only its input, and is
/// recomputed. `*` and `**` keep less, in the stage's second and third way.
inline std::string to_string(const Schedule& schedule) {
  std::string text;
  for (auto item = schedule.begin(); item != schedule.end(); ++item) {
    if (item != schedule.begin()) text += ' ';
    if (!item->segment.empty()) {
      text += '[' + to_string(item->segment) + ']';
      continue;
    }
    const auto first = item;
    while (item + 1 != schedule.end() && (item + 1)->segment.empty() && (item + 1)->way == first->way) ++item;
    text += std::to_string(first->stage);
    if (item != first) text += '-' + std::to_string(item->stage);
    text += std::string(first->way, '*');
  }
  return text;
}

/// Plans by dynamic programming: the possible costs of stages first..last follow from the costs of fewer stages.
///
/// The list of a part begins with its first stage, kept, or with a checkpointed segment. A list for the rest follows,
/// with fewer bytes. After the rest, the segment is recomputed by its own list, again with all bytes.
///
/// Implements rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains") with several ways to keep a
/// stage, and with Pareto fronts of exact bytes instead of a table of rounded bytes. Long fronts are thinned, which may
/// miss a slightly faster schedule, but never exceeds the budget or misses the least memory.
class CheckpointPlanner {
 public:
  /// Plans schedules within `budget` bytes. The front of a part has about `points` points. Fronts of parts that end
  /// with the chain have more, because they are few and divide most of the bytes.
  CheckpointPlanner(const StageCosts& stages, std::int64_t budget, std::size_t points)
      : stages_(stages), budget_(budget), fronts_(stages.size() * stages.size()) {
    for (std::size_t last = 0; last < stages.size(); ++last)
      for (auto first = last + 1; first-- > 0;) {
        ParetoFront best;
        for (const auto& beginning : beginnings(first, last)) extend(best, beginning);
        fronts_[first * stages.size() + last] = thinned(best, last + 1 < stages.size() ? points : 32 * points);
      }
  }

  /// Possible costs of the whole chain; empty if no schedule fits the budget.
  const ParetoFront& front() const { return fronts_[stages_.size() - 1]; }

  /// The fastest list for the stages first..last within `bytes`, which must suffice.
  Schedule schedule(std::size_t first, std::size_t last, std::int64_t bytes) const {
    Schedule list;
    while (first <= last) {
      const auto best = fastest(beginnings(first, last), bytes);
      if (best.segment == &nothing_)
        list.push_back({first, best.way, {}});
      else
        list.push_back({0, 0, schedule(first, best.next - 1, bytes - best.step.again)});
      bytes -= best.step.held;
      first = best.next;
    }
    return list;
  }

 private:
  /// A possible beginning of a list: its first stage, kept in some way, or a segment.
  struct Beginning {
    ItemCost step;
    std::size_t way, next;       // next: the first stage of the rest
    const ParetoFront* rest;     // its bytes come on top of step.held
    const ParetoFront* segment;  // recomputed after the rest
  };

  const ParetoFront& front(std::size_t first, std::size_t last) const { return fronts_[first * stages_.size() + last]; }

  std::vector<Beginning> beginnings(std::size_t first, std::size_t last) const {
    std::vector<Beginning> all;
    const auto& after_first = first == last ? nothing_ : front(first + 1, last);
    for (std::size_t way = 0; way < stages_[first].ways.size(); ++way)
      all.push_back({keep(stages_, first, way, last), way, first + 1, &after_first, &nothing_});
    ItemCost dropped;
    for (auto next = first + 1; next <= last; ++next) {
      drop(dropped, stages_[next - 1], gradient_alive(stages_, last));
      all.push_back({dropped, 0, next, &front(next, last), &front(first, next - 1)});
    }
    return all;
  }

  /// Adds the possible costs of lists with this beginning. With more bytes either the rest or the segment gets faster.
  void extend(ParetoFront& best, const Beginning& beginning) const {
    const auto& step = beginning.step;
    ParetoFront points;
    auto known = best.begin();
    auto known_seconds = std::numeric_limits<double>::infinity();
    auto rest = beginning.rest->begin(), segment = beginning.segment->begin();
    while (rest != beginning.rest->end() && segment != beginning.segment->end()) {
      const auto peak = std::max({step.cost.peak, step.held + rest->peak, step.again + segment->peak});
      const auto seconds = step.cost.seconds + rest->seconds + segment->seconds;
      if (peak > budget_) break;
      for (; known != best.end() && known->peak <= peak; ++known) known_seconds = known->seconds;
      if (is_faster(seconds, known_seconds)) add(points, {peak, seconds});
      const bool rest_is_last = rest + 1 == beginning.rest->end();
      const bool segment_is_last = segment + 1 == beginning.segment->end();
      const bool rest_is_next =
          segment_is_last || (!rest_is_last && step.held + rest[1].peak <= step.again + segment[1].peak);
      ++(rest_is_next ? rest : segment);
    }
    if (!points.empty()) best = merged(best, points);
  }

  static Beginning fastest(const std::vector<Beginning>& all, std::int64_t bytes) {
    const auto seconds = [&](const Beginning& beginning) {
      if (beginning.step.cost.peak > bytes) return std::numeric_limits<double>::infinity();
      return beginning.step.cost.seconds + fastest_within(bytes - beginning.step.held, *beginning.rest) +
             fastest_within(bytes - beginning.step.again, *beginning.segment);
    };
    return *std::ranges::min_element(all, is_faster, seconds);
  }

  const StageCosts& stages_;
  std::int64_t budget_;
  std::vector<ParetoFront> fronts_;             // by first and last stage
  const ParetoFront nothing_ = ParetoFront(1);  // no stages: no bytes, no time
};

/// The fewest bytes for which there is a schedule.
inline std::int64_t least_memory(const StageCosts& stages) {
  constexpr auto any = std::numeric_limits<std::int64_t>::max();
  return stages.empty() ? 0 : CheckpointPlanner(stages, any, 1).front().front().peak;
}

/// The schedule of plain training.
inline Schedule keep_everything(const StageCosts& stages) {
  Schedule schedule(stages.size());
  for (std::size_t stage = 0; stage < stages.size(); ++stage) schedule[stage].stage = stage;
  return schedule;
}

/// The fastest schedule within `budget` bytes; plain training if it fits. Throws std::invalid_argument if `budget` is
/// less than `least_memory(stages)`. Takes O(n³) time for n stages: 10 ms for 24, 0.2 s for 100.
inline Schedule fastest_schedule(const StageCosts& stages, std::int64_t budget) {
  auto plain = keep_everything(stages);
  if (cost_of(plain, stages).peak <= budget) return plain;
  const auto work = stages.size() * stages.size() * stages.size();
  const CheckpointPlanner planner(stages, budget, std::clamp<std::size_t>(10'000'000 / work, 16, 256));
  if (planner.front().empty())
    throw std::invalid_argument("fastest_schedule: budget must be >= " + std::to_string(least_memory(stages)) +
                                " bytes, got " + std::to_string(budget));
  return planner.schedule(0, stages.size() - 1, budget);
}

/// Successive modules of a chain that save tensors for backward in the same way and are recomputed together.
struct Stage {
  explicit Stage(torch::nn::AnyModule module) : parts{std::move(module)} {}

  /// Runs the modules. `way` 0 saves what LibTorch saves; `way` 1 recomputes results of cheap operations in backward.
  /// `context` is a second input of all modules, unless it is undefined.
  at::Tensor forward(std::size_t way, at::Tensor activations, const at::Tensor& context);

  std::vector<torch::nn::Module*> modules() const {
    std::vector<torch::nn::Module*> modules;
    for (auto& part : parts) modules.push_back(part.ptr().get());
    return modules;
  }

  std::vector<torch::nn::AnyModule> parts;
};

using Stages = std::vector<Stage>;

inline std::vector<torch::nn::Module*> modules_of(const Stages& stages) {
  std::vector<torch::nn::Module*> modules;
  for (auto& stage : stages)
    for (auto* module : stage.modules()) modules.push_back(module);
  return modules;
}

/// A function of a tensor that runs successive stages of a chain by a schedule. Each segment of the schedule is such a
/// function, too, and is checkpointed: segments nest, and each is recomputed by its own part of the schedule.
struct Segment {
  at::Tensor operator()(at::Tensor activations) const;

  std::shared_ptr<Stages> stages;
  std::shared_ptr<const Schedule> schedule;  // shares ownership of the whole schedule
  CheckpointOptions options;
  at::Tensor context = {};
};

/// Merges a stage into the previous one if neither saves the tensor between them, such as a linear layer and its
/// dropout: as separate stages, that tensor would count although it is freed. Also merges stages that change their
/// input in place, and stages before the first that needs gradients, since the input that a segment keeps counts for
/// the operation that needs it.
Stages merged(const Stages& stages, const at::Tensor& input, const at::Tensor& context = {});

/// Measures the cost of each stage for inputs like this one, by running it a few times. Leaves gradients of parameters
/// unchanged; the caller restores random generators and buffers.
StageCosts costs_of(Stages& stages, const at::Tensor& input, const CheckpointOptions& options,
                    const at::Tensor& context = {});

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/chain.ipp>
#endif
