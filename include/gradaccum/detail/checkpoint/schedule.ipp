// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t gradient_alive(const StageCosts& stages, std::size_t last) {
  return last + 1 == stages.size() ? 0 : stages[last].output_gradient;
}

GRADACCUM_INLINE ItemCost keep(const StageCosts& stages, std::size_t stage, std::size_t way, std::size_t last) {
  const auto& kept = stages[stage].ways[way];
  const bool stops_early = stage == last && last + 1 < stages.size();
  if (stops_early) return {{kept.again_peak, kept.again_seconds + kept.backward_seconds}, kept.held};
  const auto peak = std::max(gradient_alive(stages, last) + kept.forward_peak, kept.backward_peak);
  return {{peak, stages[stage].forward_seconds + kept.backward_seconds}, kept.held};
}

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

GRADACCUM_INLINE std::string to_string(const Schedule& schedule, const std::vector<std::string>& names) {
  const auto name = [&](std::size_t stage) { return names.empty() ? std::to_string(stage) : names[stage]; };
  std::string text;
  for (auto item = schedule.begin(); item != schedule.end(); ++item) {
    if (item != schedule.begin()) text += ' ';
    if (!item->segment.empty()) {
      text += '[' + to_string(item->segment, names) + ']';
      continue;
    }
    const auto first = item;
    while (item + 1 != schedule.end() && (item + 1)->segment.empty() && (item + 1)->way == first->way) ++item;
    text += name(first->stage) + (item == first ? "" : '-' + name(item->stage)) + std::string(first->way, '*');
  }
  return text;
}

}  // namespace gradaccum::detail
