// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>
#include <gradaccum/policies/profile.hpp>
#include <gradaccum/profiler.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/outcome.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace ga = gradaccum;
using namespace testing;

namespace {

const auto mean_loss = [](auto& net, const Example& batch) { return loss_of(net, batch); };

struct Event {
  std::string name, kind;
  double begin, end;

  bool within(const Event& other) const { return begin >= other.begin && end <= other.end; }
};

/// Returns the events of a trace that have a duration.
std::vector<Event> events_in(const std::filesystem::path& directory) {
  const auto trace = nlohmann::json::parse(text_of(directory / "trace.json"));
  std::vector<Event> events;
  for (auto& event : trace.at("traceEvents"))
    if (event.at("ph") == "X" && event.contains("cat")) {
      const double begin = event.at("ts").get<double>();
      events.push_back({event.at("name").get<std::string>(), event.at("cat").get<std::string>(), begin,
                        begin + event.at("dur").get<double>()});
    }
  return events;
}

std::vector<Event> named(const std::vector<Event>& events, const std::string& name) {
  std::vector<Event> found;
  std::copy_if(events.begin(), events.end(), std::back_inserter(found),
               [&](auto& event) { return event.name == name; });
  return found;
}

bool within_one_of(const Event& event, const std::vector<Event>& others) {
  return std::any_of(others.begin(), others.end(), [&](auto& other) { return event.within(other); });
}

std::set<std::string> names_in(const std::filesystem::path& directory) {
  std::set<std::string> names;
  for (auto& entry : std::filesystem::directory_iterator(directory)) names.insert(entry.path().filename().string());
  return names;
}

std::int64_t calls_of(const ga::ProfileReport& report, const std::string& name) {
  for (auto& operation : report.operations)
    if (operation.name == name) return operation.calls;
  return 0;
}

std::set<std::string> phases_of(const ga::ProfileReport& report) {
  std::set<std::string> names;
  for (auto& phase : report.phases) names.insert(phase.name);
  return names;
}

std::int64_t times_of(const ga::ProfileReport& report, const std::string& name) {
  for (auto& phase : report.phases)
    if (phase.name == name) return phase.times;
  return 0;
}

double sum_of_shares(const ga::ProfileReport& report) {
  double sum = 0;
  for (auto& phase : report.phases) sum += phase.share;
  return sum;
}

const std::set<std::string> all_phases{"data", "forward", "backward", "reduce", "step", "other"};
const std::set<std::string> all_files{"profile.txt", "trace.json"};
const std::vector<std::int64_t> ten_batches(10, 2);

}  // namespace

TEST_CASE("Profile: a trace of only these updates, by phases") {
  const Directory directory;
  const auto path = directory / "new/profile";
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ga::Trainer trainer(model, sgd, mean_loss, ga::Profile{.updates = {2, 4}, .directory = path},
                      ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 1.0});
  CHECK(trainer.policy<ga::Profile>().report() == nullptr);
  trainer.fit(make_batches(ten_batches));
  CHECK(names_in(path) == all_files);

  const auto events = events_in(path);
  std::map<std::string, std::int64_t> marks;
  for (auto& event : events)
    if (event.kind == "user_annotation") ++marks[event.name];
  CHECK(marks.at("data") == 4);
  CHECK(marks.at("forward") == 4);
  CHECK(marks.at("backward") == 4);
  CHECK(marks.at("reduce") == 2);
  CHECK(marks.at("step") == 2);
  CHECK(marks.at("update 3") == 1);
  CHECK(marks.at("update 4") == 1);
  CHECK(marks.size() == 8);  // and "other", but none of other updates

  auto updates = named(events, "update 3");
  updates.push_back(named(events, "update 4").at(0));
  for (auto& phase : all_phases)
    for (auto& event : named(events, phase)) CHECK(within_one_of(event, updates));
  for (auto& event : named(events, "aten::addmm")) CHECK(within_one_of(event, named(events, "forward")));
  for (auto& event : named(events, "aten::mm")) CHECK(within_one_of(event, named(events, "backward")));
  CHECK(named(events, "aten::addmm").size() == 2 * 4);
}

TEST_CASE("Profile: operations are counted, and shares are of the total time") {
  const Directory directory;
  auto model = make_model();
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
  ga::Trainer trainer(model, adam, mean_loss, ga::Profile{.updates = {1, 4}, .directory = directory / "p"},
                      ga::Accumulate{.steps = 2});
  trainer.fit(make_batches(ten_batches));
  REQUIRE(trainer.policy<ga::Profile>().report());
  const auto& report = *trainer.policy<ga::Profile>().report();
  CHECK(report.updates == 3);
  const std::int64_t micro_batches = 6;
  CHECK(calls_of(report, "aten::addmm") == 2 * micro_batches);
  CHECK(calls_of(report, "aten::mm") == 3 * micro_batches);  // the data needs no gradient
  CHECK(calls_of(report, "aten::tanh") == micro_batches);
  CHECK(calls_of(report, "aten::tanh_backward") == micro_batches);
  CHECK(calls_of(report, "aten::mse_loss") == micro_batches);
  CHECK(calls_of(report, "aten::conv2d") == 0);

  CHECK(phases_of(report) == all_phases);
  CHECK(report.phases.front().name == "data");
  CHECK(times_of(report, "forward") == micro_batches);
  CHECK(times_of(report, "step") == 3);
  CHECK(sum_of_shares(report) == Approx(1).epsilon(1e-12));
  double seconds = 0, own = 0;
  for (auto& phase : report.phases) seconds += phase.seconds;
  CHECK(seconds == Approx(report.seconds).epsilon(1e-12));
  for (auto& operation : report.operations) {
    own += operation.self_cpu_seconds;
    CHECK(operation.self_cpu_seconds >= 0);
    CHECK(operation.self_cpu_seconds <= operation.cpu_seconds * (1 + 1e-9));
    CHECK(operation.device_seconds == 0);
  }
  CHECK(own > 0);
  CHECK(own <= report.seconds);
  CHECK(std::is_sorted(report.operations.begin(), report.operations.end(),
                       [](auto& a, auto& b) { return a.self_cpu_seconds > b.self_cpu_seconds; }));

  std::int64_t allocated = 0;
  for (auto& operation : report.operations) allocated += operation.allocated_bytes;
  CHECK(allocated > 0);
  const auto largest = report.by_memory(3);
  REQUIRE(largest.size() == 3);
  CHECK(largest[0].allocated_bytes >= largest[1].allocated_bytes);
  CHECK(largest[2].allocated_bytes > 0);

  const auto text = text_of(directory / "p/profile.txt");
  CHECK(contains(text, "Updates: 3\n"));
  CHECK(contains(text, "aten::"));
  for (auto& phase : all_phases) CHECK(contains(text, '\n' + phase + ' '));
  CHECK(contains(text, "Activations"));
}

namespace {

/// Counts memory with a MemoryMeter from the beginning of an update, at the ends of its phases.
struct MeterOfAnUpdate {
  std::int64_t update = 0;
  ga::TrainerBase* trainer = nullptr;
  std::shared_ptr<std::optional<ga::MemoryMeter>> meter = std::make_shared<std::optional<ga::MemoryMeter>>();
  std::map<std::string, std::int64_t> bytes = {};
  std::int64_t peak = 0;

  void attach(ga::TrainerBase& its_trainer) { trainer = &its_trainer; }
  void see(const std::string& phase) {
    if (*meter) bytes[phase] = std::max(bytes[phase], (*meter)->live_bytes());
  }
  int forward_scope() { return see("data"), 0; }
  void before_backward(ga::Loss&) { see("forward"); }
  void after_backward(ga::Gradients&) { see("backward"); }
  void before_step(ga::Gradients&) { see("reduce"); }
  void after_window(const ga::Step&) { see("step"); }
  void at_boundary() {
    if (!*meter && trainer->updates() == update && bytes.empty()) return static_cast<void>(meter->emplace());
    see("other");
    if (*meter && trainer->updates() > update) peak = (*meter)->peak_bytes(), meter->reset();
  }
};

template <class Optimizer, class Options>
void check_memory(at::ScalarType dtype, std::int64_t moments) {
  const Directory directory;
  const auto batches = make_batches({2, 3, 3, 2, 5, 2, 2, 3}, dtype);
  const auto train = [&](auto policy) {
    auto model = make_model(dtype);
    Optimizer optimizer(model->parameters(), Options(1e-3));
    ga::Trainer trainer(model, optimizer, mean_loss, policy, ga::Accumulate{.steps = 2});
    trainer.fit(batches, {.epochs = 1});
    return trainer.template policy<decltype(policy)>();
  };
  auto profile = train(ga::Profile{.updates = {2, 3}, .directory = directory / "p"});
  const auto meter = train(MeterOfAnUpdate{.update = 1});
  REQUIRE(profile.report());
  const auto& report = *profile.report();
  const auto parameters = static_cast<std::int64_t>(c10::elementSize(dtype)) * (4 * 8 + 8 + 8 * 3 + 3);
  const auto older = (1 + moments) * parameters;
  REQUIRE(report.memory.size() == meter.bytes.size());
  for (auto& [phase, bytes] : report.memory) {
    INFO(phase);
    CHECK(bytes.total() == older + meter.bytes.at(phase));
    CHECK(bytes.parameters == parameters);
    CHECK(bytes.optimizer_state == moments * parameters);
    CHECK(bytes.rest >= 0);
    CHECK(bytes.rest < 1000);
    CHECK((bytes.activations > 0) == (phase == "forward"));
    if (phase == "backward" || phase == "reduce") CHECK(bytes.gradients == parameters);
    if (phase == "step") CHECK(bytes.gradients == 0);
  }
  CHECK(report.peak_bytes == older + meter.peak);
  CHECK(report.peak_bytes > older + parameters);
}

}  // namespace

TEST_CASE("Profile: memory by kind equals a MemoryMeter's counts, to the byte") {
  SECTION("float64") { check_memory<torch::optim::Adam, torch::optim::AdamOptions>(at::kDouble, 2); }
  SECTION("float32") { check_memory<torch::optim::Adam, torch::optim::AdamOptions>(at::kFloat, 2); }
  SECTION("ours") { check_memory<ga::optim::AdamW, ga::optim::AdamWOptions>(at::kFloat, 2); }
  SECTION("without state") { check_memory<torch::optim::SGD, torch::optim::SGDOptions>(at::kDouble, 0); }
}

TEST_CASE("Profile: activations are the memory that forward keeps for backward") {
  const Directory directory;
  const auto batches = make_batches({4, 4, 4});
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ga::Trainer trainer(model, sgd, mean_loss, ga::Profile{.updates = {1, 2}, .directory = directory / "p"});
  trainer.fit(batches);
  const auto* const report = trainer.policy<ga::Profile>().report();
  REQUIRE(report);
  const ga::MemoryMeter meter;
  const auto loss = loss_of(model, batches[0]);
  const auto forward = std::find_if(report->memory.begin(), report->memory.end(),
                                    [](auto& memory) { return memory.phase == "forward"; });
  REQUIRE(forward != report->memory.end());
  CHECK(meter.live_bytes() > 0);
  CHECK(forward->bytes.activations == meter.live_bytes());
}

TEST_CASE("Profile: profiled from the first update on, memory is that of the update after them") {
  const Directory directory;
  auto model = make_model();
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
  ga::Trainer trainer(model, adam, mean_loss, ga::Profile{.updates = {0, 1}, .directory = directory / "p"});
  const auto batches = make_batches({2, 2, 2});
  trainer.fit(batches, {.updates = 1});
  REQUIRE(trainer.policy<ga::Profile>().report());
  CHECK(trainer.policy<ga::Profile>().report()->memory.empty());
  CHECK_FALSE(contains(text_of(directory / "p/profile.txt"), "Activations"));
  trainer.fit(batches, {.updates = 2});
  CHECK(trainer.policy<ga::Profile>().report()->memory.size() == all_phases.size());
  CHECK(contains(text_of(directory / "p/profile.txt"), "Activations"));
  CHECK(names_in(directory / "p") == all_files);
}

TEST_CASE("Profile: the training is bitwise the same") {
  const Directory directory;
  const auto batches = make_batches(ten_batches, at::kFloat);
  const auto train = [&](auto... policies) {
    auto model = make_model(at::kFloat);
    ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-2));
    std::vector<double> losses;
    ga::Trainer trainer(
        model, adamw,
        [](auto& net, const Example& batch) {
          return torch::mse_loss(torch::dropout(net->forward(batch.data), 0.5, net->is_training()), batch.target);
        },
        policies..., ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 0.1},
        [&](const ga::Step& step) { losses.push_back(step.loss.item<double>()); });
    torch::manual_seed(3);
    trainer.fit(batches, {.epochs = 2});
    return std::pair(flat(model), losses);
  };
  const auto without = train();
  const auto with = train(ga::Profile{.updates = {3, 6}, .directory = directory / "p"});
  CHECK(same_bits(with.first, without.first));
  CHECK(with.second == without.second);
  CHECK(names_in(directory / "p") == all_files);
}

TEST_CASE("Profile: an evaluation within an update does not count as forward") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto batches = make_batches({2, 2, 2, 2}), unseen = batches;
  std::function<void()> evaluate;
  ga::Trainer trainer(model, sgd, mean_loss, ga::Profile{.updates = {1, 3}, .directory = directory / "p"},
                      [&](const ga::Step&) { evaluate(); });
  evaluate = [&] { trainer.evaluate(unseen); };
  trainer.fit(batches);
  const auto& report = *trainer.policy<ga::Profile>().report();
  CHECK(times_of(report, "forward") == 2);
  CHECK(calls_of(report, "aten::addmm") == 2 * (2 + 2 * 4));
}

TEST_CASE("Profile: a fit that ends early reports the updates that were made") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ga::Trainer trainer(model, sgd, mean_loss, ga::Profile{.updates = {2, 100}, .directory = directory / "p"});
  const auto batches = make_batches({2, 2, 2, 2, 2});
  trainer.fit(batches);
  REQUIRE(trainer.policy<ga::Profile>().report());
  CHECK(trainer.policy<ga::Profile>().report()->updates == 3);
  CHECK(names_in(directory / "p") == all_files);
  CHECK(ga::MemoryMeter::possible());
  const auto before = text_of(directory / "p/profile.txt");
  trainer.fit(batches);  // profiles only once
  CHECK(text_of(directory / "p/profile.txt") == before);
}

TEST_CASE("Profile: works with OptimizerInBackward, and with skipped windows") {
  const Directory directory;
  auto model = make_model();
  ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-2));
  SECTION("in backward") {
    ga::Trainer trainer(model, adamw, mean_loss, ga::OptimizerInBackward{},
                        ga::Profile{.updates = {1, 3}, .directory = directory / "p"});
    trainer.fit(make_batches({2, 2, 2, 2}));
    const auto& report = *trainer.policy<ga::Profile>().report();
    CHECK(sum_of_shares(report) == Approx(1).epsilon(1e-12));
    CHECK(times_of(report, "backward") == 2);
  }
  SECTION("skipped") {
    ga::Trainer trainer(
        model, adamw,
        [](auto& net, const Example& batch) {
          return ga::Loss{loss_of(net, batch), batch.data.size(0) == 3 ? 0 : 1};
        },
        ga::Profile{.updates = {1, 3}, .directory = directory / "p"});
    trainer.fit(make_batches({2, 3, 2, 3, 2, 2}));
    const auto& report = *trainer.policy<ga::Profile>().report();
    CHECK(report.updates == 2);
    CHECK(times_of(report, "forward") == 4);  // two in skipped windows
  }
}

namespace {

struct Breaks : torch::autograd::Function<Breaks> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("broken");
  }
};

}  // namespace

TEST_CASE("Profile: after an exception no profiler is active, and there is no file") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto batches = make_batches(ten_batches);
  const int fails_at = GENERATE(2, 3, 4, 5, 8);  // 2 and 3: in the profiled update
  const bool in_backward = GENERATE(false, true);
  int micro_batch = 0;
  ga::Trainer trainer(
      model, sgd,
      [&](auto& net, const Example& batch) {
        auto loss = loss_of(net, batch);
        if (micro_batch++ != fails_at) return loss;
        if (in_backward) return Breaks::apply(loss);
        throw std::runtime_error("broken");
      },
      ga::Profile{.updates = {2, 5}, .directory = directory / "p"}, ga::Accumulate{.steps = 2});
  REQUIRE_ERROR("broken", trainer.fit(batches));
  CHECK(ga::MemoryMeter::possible());
  const ga::MemoryMeter meter;  // throws if a profiler is still active
  CHECK(names_in(directory / "p").empty());
  CHECK(trainer.policy<ga::Profile>().report() == nullptr);
}

TEST_CASE("Profile: after an exception another fit can be profiled") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto batches = make_batches(ten_batches);
  int micro_batch = 0;
  ga::Trainer trainer(
      model, sgd,
      [&](auto& net, const Example& batch) {
        if (micro_batch++ == 3) throw std::runtime_error("broken");
        return loss_of(net, batch);
      },
      ga::Profile{.updates = {2, 5}, .directory = directory / "p"});
  REQUIRE_ERROR("broken", trainer.fit(batches));
  CHECK(trainer.updates() == 3);
  trainer.fit(batches);
  REQUIRE(trainer.policy<ga::Profile>().report());
  CHECK(trainer.policy<ga::Profile>().report()->updates == 2);  // update 3 was made before
  CHECK(names_in(directory / "p") == all_files);
}

TEST_CASE("Profile: a resumed fit") {
  const Directory directory;
  const auto batches = make_batches(ten_batches);
  const auto train = [&](std::int64_t updates) {
    auto model = make_model();
    torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
    ga::Trainer trainer(model, adam, mean_loss, ga::Profile{.updates = {5, 7}, .directory = directory / "p"},
                        ga::SaveState{.directory = directory / "states"});
    trainer.fit(batches, {.updates = updates, .resume = directory / "states"});
    const auto* const report = trainer.policy<ga::Profile>().report();
    return report ? *report : ga::ProfileReport();
  };
  CHECK(train(4).updates == 0);
  CHECK(names_in(directory / "p").empty());
  CHECK(train(6).updates == 1);
  const auto resumed = train(9);
  CHECK(resumed.updates == 1);
  CHECK(times_of(resumed, "forward") == 1);
  CHECK(resumed.memory.empty());
  CHECK(train(10).updates == 0);
}

TEST_CASE("Profile: refuses invalid options and uses") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  const auto build = [&](ga::Profile profile) { ga::Trainer(model, sgd, mean_loss, std::move(profile)); };
  const auto path = directory / "p";
  REQUIRE_ERROR("Profile: updates must be >= 0, got {-1, 3}", build({.updates = {-1, 3}, .directory = path}));
  REQUIRE_ERROR("with from < to, got {3, 3}", build({.updates = {3, 3}, .directory = path}));
  REQUIRE_ERROR("with from < to, got {4, 3}", build({.updates = {4, 3}, .directory = path}));
  REQUIRE_ERROR("Profile: directory must be given", build({.updates = {3, 4}}));

  const auto batches = make_batches({2, 2, 2});
  ga::Trainer trainer(model, sgd, mean_loss, ga::Profile{.updates = {1, 2}, .directory = path});
  REQUIRE_ERROR("Profile: must not start while a MemoryMeter counts", trainer.fit(batches, {.measure_memory = true}));
  {
    const ga::MemoryMeter meter;
    REQUIRE_ERROR("Profile: must not start while a MemoryMeter counts", trainer.fit(batches));
  }
  {
    ga::Profiler profiler;
    REQUIRE_ERROR("Profile: must not start while LibTorch's profiler runs", trainer.fit(batches));
  }
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK(trainer.updates() == 0);
  trainer.fit(batches, {.smoke = true});
  CHECK_FALSE(std::filesystem::exists(path));

  write_text(directory / "file", "");
  ga::Trainer other(model, sgd, mean_loss, ga::Profile{.updates = {1, 2}, .directory = directory / "file"});
  REQUIRE_ERROR("file: must be a directory", other.fit(batches));
}
