// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/checkpoint/chain.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace inner = gradaccum::detail;
using inner::Cost;
using inner::fastest_schedule;
using inner::least_memory;
using inner::Schedule;
using inner::ScheduleItem;
using inner::StageCosts;

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

ScheduleItem keep(std::size_t stage, std::size_t way = 0) { return {stage, way, {}}; }
ScheduleItem segment(Schedule list) { return {0, 0, std::move(list)}; }

/// Executes a schedule, one operation after another, and counts live memory: the reference for the cost of a schedule,
/// and for whether it can be executed at all.
class Machine {
 public:
  explicit Machine(const StageCosts& stages) : stages_(stages) {}

  /// Runs the whole schedule. Returns an empty text or the error.
  std::string run(const Schedule& schedule) {
    execute(schedule, true);
    if (fault_.empty() && gradient_ != 0) fault_ = "not all stages ran backward";
    if (fault_.empty() && !(outputs_.empty() && held_.empty())) fault_ = "something is left over";
    return fault_;
  }
  Cost cost() const { return cost_; }

 private:
  void execute(const Schedule& list, bool whole_chain) {
    for (std::size_t item = 0; item < list.size(); ++item) {
      const auto& [stage, way, segment] = list[item];
      if (!segment.empty())
        drop_all(segment, /*first=*/true);
      else if (whole_chain || item + 1 < list.size())
        keep_stage(stage, way);
    }
    for (auto item = list.size(); item-- > 0;) {
      const auto& [stage, way, segment] = list[item];
      if (!segment.empty())
        execute(segment, false);
      else if (whole_chain || item + 1 < list.size())
        backward(stage, way);
      else
        again(stage, way);
    }
  }

  void drop_all(const Schedule& segment, bool first) {
    for (const auto& item : segment) {
      if (item.segment.empty())
        drop(item.stage, first);
      else
        drop_all(item.segment, first);
      first = false;
    }
  }

  void drop(std::size_t stage, bool input_stays) {
    need_input(stage);
    during(alive() + stages_[stage].forward_peak, stages_[stage].forward_seconds);
    outputs_.insert(stage);
    if (!input_stays) outputs_.erase(stage - 1);
  }

  void keep_stage(std::size_t stage, std::size_t way) {
    need_input(stage);
    during(alive() + stages_[stage].ways[way].forward_peak, stages_[stage].forward_seconds);
    held_[stage] = stages_[stage].ways[way].held;
  }

  void backward(std::size_t stage, std::size_t way) {
    need_input(stage);
    if (held_.count(stage) == 0) fault("nothing is held for stage ", stage);
    held_.erase(stage);
    back(stage, stages_[stage].ways[way].backward_peak, stages_[stage].ways[way].backward_seconds);
  }

  void again(std::size_t stage, std::size_t way) {
    need_input(stage);
    const auto& kept = stages_[stage].ways[way];
    back(stage, kept.again_peak, kept.again_seconds + kept.backward_seconds);
  }

  void back(std::size_t stage, std::int64_t peak, double seconds) {
    if (gradient_ != stage + 1) fault("no gradient for stage ", stage);
    gradient_ = 0;  // counts for the peak
    during(alive() + peak, seconds);
    gradient_ = stage;
    outputs_.erase(stage - 1);  // a checkpoint is not needed any more
  }

  void need_input(std::size_t stage) {
    if (stage > 0 && outputs_.count(stage - 1) + held_.count(stage - 1) == 0) fault("no input for stage ", stage);
  }

  void fault(const char* what, std::size_t stage) {
    if (fault_.empty()) fault_ = what + std::to_string(stage);
  }

  std::int64_t alive() const {
    std::int64_t bytes = 0;
    for (auto stage : outputs_) bytes += stages_[stage].output;
    for (auto& [stage, held] : held_) bytes += held;
    if (gradient_ > 0 && gradient_ < stages_.size()) bytes += stages_[gradient_ - 1].output_gradient;
    return bytes;
  }

  void during(std::int64_t peak, double seconds) {
    cost_.peak = std::max(cost_.peak, peak);
    cost_.seconds += seconds;
  }

  const StageCosts& stages_;
  std::set<std::size_t> outputs_;             // checkpoints and temporary outputs
  std::map<std::size_t, std::int64_t> held_;  // for the backward pass
  std::size_t gradient_ = stages_.size();     // for the input of this stage; the loss's does not count
  Cost cost_;
  std::string fault_;
};

/// Returns the machine's cost of a schedule that it can execute.
Cost executed(const Schedule& schedule, const StageCosts& stages) {
  Machine machine(stages);
  INFO(inner::to_string(schedule));
  REQUIRE(machine.run(schedule).empty());
  return machine.cost();
}

/// Returns every schedule for the stages first..last.
std::vector<Schedule> all_schedules(const StageCosts& stages, std::size_t first, std::size_t last) {
  std::vector<Schedule> all;
  const auto append = [&](const ScheduleItem& item, std::size_t next) {
    for (auto& rest : next > last ? std::vector<Schedule>(1) : all_schedules(stages, next, last)) {
      all.push_back({item});
      all.back().insert(all.back().end(), rest.begin(), rest.end());
    }
  };
  for (std::size_t way = 0; way < stages[first].ways.size(); ++way) append(keep(first, way), first + 1);
  for (auto next = first + 1; next <= last; ++next)
    for (auto& list : all_schedules(stages, first, next - 1)) append(segment(list), next);
  return all;
}

/// The fastest order of the machine's operations within a budget, among all orders and not only schedules, which free a
/// checkpoint only after its use. Dijkstra's algorithm over the sets of live tensors.
class AnyOrder {
 public:
  AnyOrder(const StageCosts& stages, std::int64_t budget) : stages_(stages), budget_(budget) {}

  double seconds() {
    const auto count = static_cast<int>(stages_.size());
    reach({std::vector<int>(stages_.size()), count}, 0);
    while (!queue_.empty()) {
      const auto [negative, state] = queue_.top();
      queue_.pop();
      if (-negative > best_.at(state)) continue;
      if (state.second == 0) return -negative;
      expand(state, -negative);
    }
    return never;
  }

 private:
  /// For each stage nothing (0), its output alone (1), or the tensors of a way (2 + way); and the number of stages that
  /// still have to run backward.
  using State = std::pair<std::vector<int>, int>;

  void expand(const State& state, double now) {
    const auto bytes = alive(state);
    const auto next = static_cast<std::size_t>(state.second - 1);
    for (std::size_t stage = 0; stage <= next; ++stage) {
      if (state.first[stage] != 0) reach(with(state, stage, 0), now);
      if (stage > 0 && state.first[stage - 1] == 0) continue;
      const auto& cost = stages_[stage];
      if (state.first[stage] == 0 && bytes + cost.forward_peak <= budget_)
        reach(with(state, stage, 1), now + cost.forward_seconds);
      for (std::size_t way = 0; way < cost.ways.size(); ++way)
        if (state.first[stage] < 2 && bytes + cost.ways[way].forward_peak <= budget_)
          reach(with(state, stage, 2 + static_cast<int>(way)), now + cost.forward_seconds);
    }
    if (next > 0 && state.first[next - 1] == 0) return;
    const bool loss_is_there = next + 1 < stages_.size();
    const auto others = alive(with(state, next, 0)) - (loss_is_there ? stages_[next].output_gradient : 0);
    for (std::size_t way = 0; way < stages_[next].ways.size(); ++way) {
      const auto& kept = stages_[next].ways[way];
      const State after{with(state, next, 0).first, static_cast<int>(next)};
      if (state.first[next] == 2 + static_cast<int>(way) && others + kept.backward_peak <= budget_)
        reach(after, now + kept.backward_seconds);
      if (loss_is_there && others + kept.again_peak <= budget_)
        reach(after, now + kept.again_seconds + kept.backward_seconds);
    }
  }

  static State with(State state, std::size_t stage, int what) {
    state.first[stage] = what;
    return state;
  }

  std::int64_t alive(const State& state) const {
    std::int64_t bytes = 0;
    for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
      const auto what = state.first[stage];
      if (what == 1) bytes += stages_[stage].output;
      if (what > 1) bytes += stages_[stage].ways[static_cast<std::size_t>(what - 2)].held;
    }
    const auto left = static_cast<std::size_t>(state.second);
    return bytes + (left > 0 && left < stages_.size() ? stages_[left - 1].output_gradient : 0);
  }

  void reach(const State& state, double seconds) {
    const auto known = best_.find(state);
    if (known != best_.end() && known->second <= seconds) return;
    best_[state] = seconds;
    queue_.emplace(-seconds, state);
  }

  const StageCosts& stages_;
  std::int64_t budget_;
  std::map<State, double> best_;
  std::priority_queue<std::pair<double, State>> queue_;
};

/// Random chains. Times are small integers, so sums are exact. Bytes are few or many.
class Chains {
 public:
  explicit Chains(unsigned seed) : random_(seed) {}

  std::int64_t any(std::int64_t from, std::int64_t to) {
    return std::uniform_int_distribution<std::int64_t>(from, to)(random_);
  }

  StageCosts operator()(std::size_t count, std::size_t most_ways) {
    unit_ = any(0, 1) == 1 ? 1 : 1'234'567'891;
    StageCosts stages(count);
    for (auto& stage : stages) {
      stage.forward_seconds = static_cast<double>(any(0, 5));
      stage.output = any(0, 4) == 0 ? 0 : bytes(1, 4);  // views have no bytes
      stage.forward_peak = stage.output + bytes(0, 3);
      stage.output_gradient = any(0, 3) == 0 ? 0 : bytes(1, 4);
      stage.ways.resize(static_cast<std::size_t>(any(1, static_cast<std::int64_t>(most_ways))));
      for (auto& way : stage.ways) {
        way.held = stage.output + (any(0, 4) == 0 ? 0 : bytes(0, 7));
        way.forward_peak = way.held + bytes(0, 3);
        way.backward_peak = way.held + bytes(0, 6);
        way.again_peak = way.held + bytes(0, 6);
        way.backward_seconds = static_cast<double>(any(0, 8));
        way.again_seconds = static_cast<double>(any(0, 5));
      }
    }
    return stages;
  }

 private:
  /// Multiplies by the unit and subtracts a little, so that no two sizes have a common divisor.
  std::int64_t bytes(std::int64_t from, std::int64_t to) {
    const auto units = any(from, to) * unit_;
    return units == 0 ? 0 : units - any(0, unit_ / 3);
  }

  std::mt19937 random_;
  std::int64_t unit_ = 1;
};

/// Makes stopping early never slower, which a random chain does not guarantee.
StageCosts with_early_stops(StageCosts stages) {
  for (auto& stage : stages)
    for (auto& way : stage.ways) {
      way.again_peak = std::min(way.again_peak, std::max(stage.output_gradient + way.forward_peak, way.backward_peak));
      way.again_seconds = std::min(way.again_seconds, stage.forward_seconds);
    }
  return stages;
}

/// Equal blocks of a transformer: 32 units held for backward, 2 for the output; backward takes twice forward's time.
StageCosts blocks(std::size_t count, bool several_ways) {
  StageCosts stages(count);
  for (auto& stage : stages) {
    stage.forward_seconds = 1;
    stage.output = stage.output_gradient = 2;
    stage.forward_peak = 8;
    stage.ways.push_back({32, 34, 38, 38, 2, 1});
    if (several_ways) stage.ways.push_back({24, 34, 38, 38, 2.05, 1});
    if (several_ways) stage.ways.push_back({16, 34, 38, 38, 2.25, 1});
  }
  return stages;
}

/// Makes such blocks with unequal sizes.
StageCosts uneven_blocks(std::size_t count) {
  auto stages = blocks(count, true);
  Chains chains(11);
  for (auto& stage : stages) {
    const auto scale = chains.any(300'000, 1'700'000);
    stage.forward_seconds *= static_cast<double>(chains.any(50, 150)) / 100;
    for (auto* bytes : {&stage.output, &stage.forward_peak, &stage.output_gradient}) *bytes *= scale;
    for (auto& way : stage.ways) {
      for (auto* bytes : {&way.held, &way.forward_peak, &way.backward_peak, &way.again_peak}) *bytes *= scale;
      way.backward_seconds *= stage.forward_seconds;
      way.again_seconds *= stage.forward_seconds * 0.9;
    }
  }
  return stages;
}

/// Makes the schedule of torch.utils.checkpoint.checkpoint_sequential: equal segments, the last of which is kept.
Schedule periodic(std::size_t count, std::size_t segments) {
  Schedule schedule;
  for (std::size_t first = 0; first < count; first += count / segments) {
    Schedule stages;
    for (auto stage = first; stage < first + count / segments; ++stage) stages.push_back(keep(stage));
    if (first + count / segments < count)
      schedule.push_back(segment(stages));
    else
      schedule.insert(schedule.end(), stages.begin(), stages.end());
  }
  return schedule;
}

Cost plain(const StageCosts& stages) { return inner::cost_of(inner::keep_everything(stages), stages); }

}  // namespace

TEST_CASE("What a schedule costs: by hand") {
  StageCosts stages(3);
  // Each way: held, forward, backward, again; seconds backward, again
  stages[0] = {1, 10, 25, 12, 0, 0, {{100, 130, 170, 150, 2, 0.5}, {60, 131, 180, 155, 2.25, 0.5}}};
  stages[1] = {2, 20, 40, 21, 0, 0, {{200, 210, 290, 280, 4, 1.5}}};
  stages[2] = {3, 30, 50, 31, 0, 0, {{300, 330, 380, 370, 6, 2.5}}};
  const auto cost = [&](const Schedule& schedule) {
    const auto cost = inner::cost_of(schedule, stages);
    const auto oracle = executed(schedule, stages);
    CHECK(cost.peak == oracle.peak);
    CHECK(cost.seconds == oracle.seconds);
    return std::pair(cost.peak, cost.seconds);
  };
  CHECK(cost({keep(0), keep(1), keep(2)}) == std::pair<std::int64_t, double>(100 + 200 + 380, 6 + 12));
  CHECK(cost({keep(0, 1), keep(1), keep(2)}) == std::pair<std::int64_t, double>(60 + 200 + 380, 6 + 12.25));
  // 0 is recomputed up to its last saved tensor
  CHECK(cost({segment({keep(0)}), keep(1), keep(2)}) == std::pair<std::int64_t, double>(10 + 200 + 380, 18 + 0.5));
  CHECK(cost({keep(0), segment({keep(1)}), keep(2)}) == std::pair<std::int64_t, double>(100 + 20 + 380, 18 + 1.5));
  // The rest holds 20 + 380; the segment 100 + 280.
  CHECK(cost({segment({keep(0), keep(1)}), keep(2)}) == std::pair<std::int64_t, double>(400, 18 + 1 + 1.5));
  stages[0].ways[0].forward_peak = 400;  // while 1's gradient is live
  CHECK(cost({segment({keep(0), keep(1)}), keep(2)}) == std::pair<std::int64_t, double>(21 + 400, 18 + 1 + 1.5));
  CHECK(cost({segment({segment({keep(0)}), keep(1)}), keep(2)}) ==
        std::pair<std::int64_t, double>(400, 18 + 1 + 1.5 + 0.5));
  stages[1].forward_peak = 500;  // with 0's output, in the first forward pass
  CHECK(cost({segment({keep(0), keep(1)}), keep(2)}) == std::pair<std::int64_t, double>(510, 18 + 1 + 1.5));
  CHECK(inner::cost_of({}, {}).peak == 0);
}

TEST_CASE("What a schedule costs: the machine agrees for all schedules") {
  Chains chains(1);
  int schedules = 0;
  for (int i = 0; i < 400; ++i) {
    const auto stages = chains(static_cast<std::size_t>(chains.any(1, 4)), 2);
    for (const auto& schedule : all_schedules(stages, 0, stages.size() - 1)) {
      const auto oracle = executed(schedule, stages);
      const auto cost = inner::cost_of(schedule, stages);
      REQUIRE(cost.peak == oracle.peak);
      REQUIRE(cost.seconds == oracle.seconds);
      ++schedules;
    }
  }
  CHECK(schedules > 10'000);
}

TEST_CASE("The machine: detects a schedule that cannot be executed") {
  const auto stages = blocks(5, true);
  const auto fault = [&](const Schedule& schedule) { return Machine(stages).run(schedule); };
  const auto first = segment({keep(0), keep(1)}), second = segment({keep(2), keep(3)});
  CHECK(fault({first, second, keep(4)}).empty());
  CHECK(fault({second, first, keep(4)}) == "no input for stage 2");
  CHECK(fault({first, keep(3), keep(4)}) == "no input for stage 3");
  CHECK(fault({first, second}) == "no gradient for stage 3");
  CHECK(fault({keep(1), keep(0), keep(2), keep(3), keep(4)}).find("stage") != std::string::npos);
  CHECK(fault({keep(1), keep(2), keep(3), keep(4)}) == "no input for stage 1");
  // The machine also detects schedules that need more memory.
  const Schedule less{keep(0, 2), keep(1, 2), keep(2, 2), keep(3, 2), keep(4, 2)};
  CHECK(executed({first, second, keep(4)}, stages).peak < executed({first, keep(2), keep(3), keep(4)}, stages).peak);
  CHECK(executed(less, stages).peak < executed(inner::keep_everything(stages), stages).peak);
}

TEST_CASE("fastest_schedule: the fastest of all schedules for every budget; least_memory: the least") {
  Chains chains(2);
  int budgets = 0, checkpointed = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto count = static_cast<std::size_t>(chains.any(1, 5));
    const auto stages = chains(count, count < 4 ? 3 : count == 4 ? 2 : 1);
    std::map<std::int64_t, double> fastest;  // by peak
    for (const auto& schedule : all_schedules(stages, 0, count - 1)) {
      const auto cost = executed(schedule, stages);
      const auto known = fastest.emplace(cost.peak, cost.seconds).first;
      known->second = std::min(known->second, cost.seconds);
    }
    const auto least = fastest.begin()->first;
    REQUIRE(least_memory(stages) == least);
    REQUIRE_ERROR("budget must be >= " + std::to_string(least) + " bytes, got " + std::to_string(least - 1),
                  fastest_schedule(stages, least - 1));
    double best = never;
    for (const auto& [budget, seconds] : fastest) {
      best = std::min(best, seconds);
      const auto schedule = fastest_schedule(stages, budget);
      const auto cost = executed(schedule, stages);
      INFO(inner::to_string(schedule) << " within " << budget);
      REQUIRE(cost.peak <= budget);
      if (budget < plain(stages).peak)
        REQUIRE(cost.seconds == best);
      else
        REQUIRE(cost.seconds == plain(stages).seconds);
      ++budgets;
      checkpointed += std::any_of(schedule.begin(), schedule.end(), [](auto& item) { return !item.segment.empty(); });
    }
  }
  CHECK(budgets > 10'000);
  CHECK(checkpointed > 3000);
}

TEST_CASE("fastest_schedule: longer chains stay within any budget, as predicted") {
  Chains chains(3);
  for (int i = 0; i < 2000; ++i) {
    const auto stages = chains(static_cast<std::size_t>(chains.any(5, 7)), 3);
    const auto least = least_memory(stages), all = plain(stages).peak;
    for (const auto budget : {least, least < all ? chains.any(least, all - 1) : all}) {
      const auto schedule = fastest_schedule(stages, budget);
      const auto cost = executed(schedule, stages);
      REQUIRE(cost.peak <= budget);
      REQUIRE(cost.peak == inner::cost_of(schedule, stages).peak);
      REQUIRE(cost.seconds == inner::cost_of(schedule, stages).seconds);
      if (budget >= all) continue;
      const inner::CheckpointPlanner planner(stages, budget, 4096);
      REQUIRE(cost.seconds == planner.front().back().seconds);
      REQUIRE(least == planner.front().front().peak);
    }
    REQUIRE(inner::CheckpointPlanner(stages, least - 1, 4096).front().empty());
  }
}

TEST_CASE("fastest_schedule: never faster than the best order of operations, and seldom slower") {
  Chains chains(4);
  int same = 0, slower = 0, impossible = 0;
  double worst = 1;
  for (int i = 0; i < 2000; ++i) {
    const auto count = static_cast<std::size_t>(chains.any(2, 4));
    const auto stages = with_early_stops(chains(count, 2));
    const auto least = least_memory(stages), all = plain(stages).peak;
    if (least == all) continue;
    const auto budget = chains.any(0, 2) == 0 ? least : chains.any(least, all - 1);
    const auto seconds = inner::cost_of(fastest_schedule(stages, budget), stages).seconds;
    const auto bound = AnyOrder(stages, budget).seconds();
    REQUIRE(seconds >= bound);
    ++(seconds == bound ? same : slower);
    worst = std::max(worst, seconds / bound);
    impossible += AnyOrder(stages, least - 1).seconds() < never;
  }
  INFO(same << " as fast, " << slower << " slower, by up to " << worst << "; less memory in " << impossible);
  CHECK(same > 7 * slower);  // slower if a checkpoint should be freed before its use
  CHECK(worst < 1.5);
  CHECK(same > 1000);
}

TEST_CASE("fastest_schedule: as fast as equal segments with their memory") {
  const auto stages = blocks(24, false);
  for (const std::size_t segments : {2u, 3u, 4u, 6u, 8u, 12u, 24u}) {
    const auto equal = executed(periodic(24, segments), stages);
    CHECK(equal.seconds == 24 * 3 + 24 - static_cast<double>(24 / segments));
    const auto schedule = fastest_schedule(stages, equal.peak);
    INFO(segments << " segments: " << inner::to_string(schedule));
    CHECK(executed(schedule, stages).seconds <= equal.seconds);
    const auto several = blocks(24, true);  // keeping less of each stage is cheaper
    CHECK(executed(fastest_schedule(several, equal.peak), several).seconds < equal.seconds);
  }
  CHECK(inner::to_string(fastest_schedule(stages, executed(periodic(24, 2), stages).peak)) == "[0-11] 12-23");
}

TEST_CASE("fastest_schedule: more memory is never slower, except for the loss by thinned fronts") {
  for (const auto& stages : {blocks(24, true), uneven_blocks(24), uneven_blocks(40)}) {
    const auto least = least_memory(stages), all = plain(stages).peak;
    CHECK(least < all / 8);
    auto before = never;
    for (int step = 0; step <= 20; ++step) {
      const auto schedule = fastest_schedule(stages, least + (all - least) * step / 20);
      const auto cost = executed(schedule, stages);
      CHECK(cost.peak <= least + (all - least) * step / 20);
      CHECK(cost.seconds <= before * 1.001);
      before = cost.seconds;
    }
    CHECK(before == executed(inner::keep_everything(stages), stages).seconds);
  }
}

TEST_CASE("fastest_schedule: thinned fronts lose little, and keep the least memory and the budget") {
  const auto stages = uneven_blocks(24);
  const auto least = least_memory(stages), all = plain(stages).peak;
  for (const auto budget : {least, all / 8, all / 4, all / 2, all - 1}) {
    const inner::CheckpointPlanner thin(stages, budget, 16), full(stages, budget, 1'000'000);
    const auto schedule = thin.schedule(0, 23, budget);
    const auto cost = executed(schedule, stages), best = executed(full.schedule(0, 23, budget), stages);
    CHECK(cost.peak <= budget);
    CHECK(thin.front().front().peak == least);
    CHECK(full.front().front().peak == least);
    CHECK(best.seconds == Approx(full.front().back().seconds).epsilon(1e-9));
    CHECK(cost.seconds <= best.seconds * 1.003);
  }
}

TEST_CASE("fastest_schedule: plain training if it fits") {
  auto stages = blocks(24, true);
  stages[3].ways[1].backward_seconds = 1.99;  // noise of a measurement
  const auto all = plain(stages).peak;
  CHECK(inner::to_string(fastest_schedule(stages, all)) == "0-23");
  CHECK(inner::to_string(fastest_schedule(stages, all - 1)) != "0-23");
  CHECK(executed(fastest_schedule(stages, all - 1), stages).peak < all);
}

TEST_CASE("fastest_schedule: none, one and a hundred stages") {
  CHECK(least_memory({}) == 0);
  CHECK(fastest_schedule({}, 0).empty());
  StageCosts one(1);
  one[0] = {1, 10, 15, 10, 0, 0, {{100, 130, 170, 1, 2, 0.5}, {60, 131, 140, 1, 2.25, 0.5}}};
  CHECK(least_memory(one) == 140);
  CHECK(inner::to_string(fastest_schedule(one, 140)) == "0*");
  CHECK(inner::to_string(fastest_schedule(one, 169)) == "0*");
  CHECK(inner::to_string(fastest_schedule(one, 170)) == "0");
  REQUIRE_ERROR("fastest_schedule: budget must be >= 140 bytes, got -5", fastest_schedule(one, -5));
  const auto hundred = uneven_blocks(100);
  const auto half = plain(hundred).peak / 2;
  const auto cost = executed(fastest_schedule(hundred, half), hundred);
  CHECK(cost.peak <= half);
  CHECK(cost.peak > half / 100 * 99);
  CHECK(cost.seconds < plain(hundred).seconds * 1.08);
}

TEST_CASE("fastest_schedule: stages without bytes and without time") {
  StageCosts views(6);
  for (auto& view : views) view.ways.resize(2);
  CHECK(least_memory(views) == 0);
  CHECK(inner::to_string(fastest_schedule(views, 0)) == "0-5");
  REQUIRE_ERROR("budget must be >= 0 bytes, got -1", fastest_schedule(views, -1));
}

TEST_CASE("ParetoFront: costlier and slower points are removed; thinning keeps the fastest of each share") {
  const auto front = [](std::vector<std::pair<std::int64_t, double>> points) {
    inner::ParetoFront front;
    for (auto& [peak, seconds] : points) inner::add(front, {peak, seconds});
    return front;
  };
  const auto points = [](const inner::ParetoFront& front) {
    std::vector<std::pair<std::int64_t, double>> points;
    for (auto& point : front) points.emplace_back(point.peak, point.seconds);
    return points;
  };
  using Points = std::vector<std::pair<std::int64_t, double>>;
  CHECK(points(front({{1, 9}, {2, 9}, {3, 8}, {3, 7}, {4, 7 - 1e-14}, {5, 1}})) == Points{{1, 9}, {3, 7}, {5, 1}});
  CHECK(points(inner::merged(front({{1, 9}, {3, 7}, {5, 1}}), front({{2, 7}, {4, 2}, {6, 1}}))) ==
        Points{{1, 9}, {2, 7}, {4, 2}, {5, 1}});
  CHECK(points(inner::merged({}, front({{1, 9}}))) == Points{{1, 9}});
  CHECK(inner::merged(inner::ParetoFront(), {}).empty());

  const auto long_one = front({{10, 9}, {11, 8}, {12, 7}, {19, 6}, {20, 5}, {29, 4}, {30, 3}, {39, 2}});  // 10, 20, 30
  CHECK(points(inner::thinned(long_one, 8)) == points(long_one));
  CHECK(points(inner::thinned(long_one, 3)) == Points{{10, 9}, {19, 6}, {29, 4}, {39, 2}});
  CHECK(points(inner::thinned(long_one, 1)) == Points{{10, 9}, {39, 2}});
  CHECK(points(inner::thinned(front({{0, 3}, {1, 2}}), 2)) == Points{{0, 3}, {1, 2}});
  CHECK(points(inner::thinned(front({{0, 4}, {1, 3}, {2, 2}}), 2)) ==
        Points{{0, 4}, {1, 3}, {2, 2}});  // alone in its share
  CHECK(inner::thinned({}, 1).empty());

  CHECK(inner::fastest_within(9, long_one) == never);
  CHECK(inner::fastest_within(10, long_one) == 9);
  CHECK(inner::fastest_within(28, long_one) == 5);
  CHECK(inner::fastest_within(1000, long_one) == 2);
  CHECK(inner::fastest_within(1000, {}) == never);
}

TEST_CASE("to_string: a readable line") {
  CHECK(inner::to_string({}).empty());
  const Schedule schedule{segment({keep(0), keep(1), keep(2)}),
                          keep(3),
                          segment({segment({keep(4), keep(5)}), keep(6)}),
                          keep(7),
                          keep(8),
                          keep(9, 1),
                          keep(10, 1),
                          keep(11, 2),
                          segment({keep(12, 1)}),
                          keep(13)};
  CHECK(inner::to_string(schedule) == "[0-2] 3 [[4-5] 6] 7-8 9-10* 11** [12*] 13");
}
