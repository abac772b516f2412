// SPDX-License-Identifier: Apache-2.0
// Plans which stages of a chain keep their activations within a number of bytes, at the least time.
#pragma once

#include <gradaccum/detail/checkpoint/chain.hpp>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns whether `seconds` is less than `than` by more than rounding errors of sums.
GRADACCUM_INLINE bool is_faster(double seconds, double than) { return seconds < than * (1 - 1e-12); }

GRADACCUM_INLINE void add(ParetoFront& front, const Cost& point) {
  if (!front.empty() && !is_faster(point.seconds, front.back().seconds)) return;
  if (!front.empty() && front.back().peak == point.peak) front.pop_back();
  front.push_back(point);
}

GRADACCUM_INLINE ParetoFront merged(const ParetoFront& one, const ParetoFront& other) {
  ParetoFront both(one.size() + other.size()), front;
  std::ranges::merge(one, other, both.begin(), {}, &Cost::peak, &Cost::peak);
  for (const auto& point : both) add(front, point);
  return front;
}

GRADACCUM_INLINE ParetoFront thinned(const ParetoFront& front, std::size_t shares) {
  if (front.size() <= shares) return front;
  const auto least = front.front().peak, width = (front.back().peak - least) / static_cast<std::int64_t>(shares) + 1;
  const auto share = [&](std::size_t point) { return (front[point].peak - least) / width; };
  ParetoFront thin{front.front()};
  for (std::size_t point = 1; point < front.size(); ++point)
    if (point + 1 == front.size() || share(point) != share(point + 1)) thin.push_back(front[point]);
  return thin;
}

GRADACCUM_INLINE double fastest_within(std::int64_t bytes, const ParetoFront& front) {
  const auto beyond = std::ranges::upper_bound(front, bytes, {}, &Cost::peak);
  return beyond == front.begin() ? std::numeric_limits<double>::infinity() : (beyond - 1)->seconds;
}

/// Bytes of the gradient that is alive while a list that ends with stage `last` runs forward. 0 for the whole chain,
/// since the loss has no gradient yet.
GRADACCUM_INLINE std::int64_t gradient_alive(const StageCosts& stages, std::size_t last) {
  return last + 1 == stages.size() ? 0 : stages[last].output_gradient;
}

/// The cost of keeping a stage in `way`, in a list that ends with stage `last`.
GRADACCUM_INLINE ItemCost keep(const StageCosts& stages, std::size_t stage, std::size_t way, std::size_t last) {
  const auto& kept = stages[stage].ways[way];
  const bool stops_early = stage == last && last + 1 < stages.size();
  if (stops_early) return {{kept.again_peak, kept.again_seconds + kept.backward_seconds}, kept.held};
  const auto peak = std::max(gradient_alive(stages, last) + kept.forward_peak, kept.backward_peak);
  return {{peak, stages[stage].forward_seconds + kept.backward_seconds}, kept.held};
}

/// Adds a stage to a segment's first forward pass, while `gradient` bytes are alive. Only the segment's input is kept,
/// and it does not count. The output of each stage lives until the next stage has its own.
GRADACCUM_INLINE void drop(ItemCost& segment, const StageCost& stage, std::int64_t gradient) {
  segment.cost.peak = std::max(segment.cost.peak, gradient + segment.held + stage.forward_peak);
  segment.cost.seconds += stage.forward_seconds;
  segment.held = stage.output;
}

GRADACCUM_INLINE std::size_t first_stage(const ScheduleItem& item) {
  return item.segment.empty() ? item.stage : first_stage(item.segment.front());
}

GRADACCUM_INLINE Cost cost_of(const Schedule& schedule, const StageCosts& stages) {
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
      step.cost = {std::max(step.cost.peak, again.peak), step.cost.seconds + again.seconds};
    }
    all = {std::max(all.peak, held + step.cost.peak), all.seconds + step.cost.seconds};
    held += step.held;
  }
  return all;
}

GRADACCUM_INLINE std::string to_string(const Schedule& schedule) {
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

GRADACCUM_INLINE CheckpointPlanner::CheckpointPlanner(const StageCosts& stages, std::int64_t budget, std::size_t points)
    : stages_(stages), budget_(budget), fronts_(stages.size() * stages.size()) {
  for (std::size_t last = 0; last < stages.size(); ++last)
    for (auto first = last + 1; first-- > 0;) {
      ParetoFront best;
      for (const auto& beginning : beginnings(first, last)) extend(best, beginning);
      fronts_[first * stages.size() + last] = thinned(best, last + 1 < stages.size() ? points : 32 * points);
    }
}

GRADACCUM_INLINE Schedule CheckpointPlanner::schedule(std::size_t first, std::size_t last, std::int64_t bytes) const {
  Schedule list;
  while (first <= last) {
    const auto best = fastest(beginnings(first, last), bytes);
    if (best.segment == &nothing_)
      list.push_back({first, best.way, {}});
    else
      list.push_back({0, 0, schedule(first, best.next - 1, bytes)});
    bytes -= best.step.held;
    first = best.next;
  }
  return list;
}

GRADACCUM_INLINE std::vector<CheckpointPlanner::Beginning> CheckpointPlanner::beginnings(std::size_t first,
                                                                                         std::size_t last) const {
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

/// Adds the possible costs of lists with this beginning. As bytes grow, now the rest becomes faster, now the segment.
GRADACCUM_INLINE void CheckpointPlanner::extend(ParetoFront& best, const Beginning& beginning) const {
  const auto& step = beginning.step;
  ParetoFront points;
  auto known = best.begin();
  auto known_seconds = std::numeric_limits<double>::infinity();
  auto rest = beginning.rest->begin(), segment = beginning.segment->begin();
  while (rest != beginning.rest->end() && segment != beginning.segment->end()) {
    const auto peak = std::max({step.cost.peak, step.held + rest->peak, segment->peak});
    const auto seconds = step.cost.seconds + rest->seconds + segment->seconds;
    if (peak > budget_) break;
    for (; known != best.end() && known->peak <= peak; ++known) known_seconds = known->seconds;
    if (is_faster(seconds, known_seconds)) add(points, {peak, seconds});
    const bool rest_is_last = rest + 1 == beginning.rest->end();
    const bool segment_is_last = segment + 1 == beginning.segment->end();
    const bool rest_is_next = segment_is_last || (!rest_is_last && step.held + rest[1].peak <= segment[1].peak);
    ++(rest_is_next ? rest : segment);
  }
  if (!points.empty()) best = merged(best, points);
}

GRADACCUM_INLINE CheckpointPlanner::Beginning CheckpointPlanner::fastest(const std::vector<Beginning>& all,
                                                                         std::int64_t bytes) {
  const auto seconds = [&](const Beginning& beginning) {
    if (beginning.step.cost.peak > bytes) return std::numeric_limits<double>::infinity();
    return beginning.step.cost.seconds + fastest_within(bytes - beginning.step.held, *beginning.rest) +
           fastest_within(bytes, *beginning.segment);
  };
  return *std::min_element(all.begin(), all.end(),
                           [&](const Beginning& a, const Beginning& b) { return is_faster(seconds(a), seconds(b)); });
}

GRADACCUM_INLINE std::int64_t least_memory(const StageCosts& stages) {
  constexpr auto any = std::numeric_limits<std::int64_t>::max();
  return stages.empty() ? 0 : CheckpointPlanner(stages, any, 1).front().front().peak;
}

GRADACCUM_INLINE Schedule keep_everything(const StageCosts& stages) {
  Schedule schedule(stages.size());
  for (std::size_t stage = 0; stage < stages.size(); ++stage) schedule[stage].stage = stage;
  return schedule;
}

GRADACCUM_INLINE Schedule fastest_schedule(const StageCosts& stages, std::int64_t budget) {
  auto plain = keep_everything(stages);
  if (cost_of(plain, stages).peak <= budget) return plain;
  const auto work = stages.size() * stages.size() * stages.size();
  const CheckpointPlanner planner(stages, budget, std::clamp<std::size_t>(10'000'000 / work, 16, 256));
  if (planner.front().empty())
    throw std::invalid_argument("fastest_schedule: budget must be >= " + std::to_string(least_memory(stages)) +
                                " bytes, got " + std::to_string(budget));
  return planner.schedule(0, stages.size() - 1, budget);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
