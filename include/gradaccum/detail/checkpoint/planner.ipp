// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/planner.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace gradaccum::detail {

GRADACCUM_INLINE CheckpointPlanner::CheckpointPlanner(const StageCosts& stages, std::int64_t budget, std::size_t points)
    : stages_(stages), budget_(budget), fronts_(stages.size() * stages.size()) {
  for (std::size_t last = 0; last < stages.size(); ++last)
    for (auto first = last + 1; first-- > 0;) {
      ParetoFront best;
      for (const auto& beginning : beginnings(first, last)) extend(best, beginning);
      front(first, last) = thinned(best, last + 1 < stages.size() ? points : 32 * points);
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
