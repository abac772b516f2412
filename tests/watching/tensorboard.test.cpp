// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/tensorboard.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>

#include "support/event_files.hpp"
#include "support/file_size_limit.hpp"
#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

constexpr auto late = std::chrono::hours(1);  // never flushes by time

using Batches = std::vector<std::pair<double, int>>;  // loss and slope, and the number of items

struct Net : torch::nn::Module {
  at::Tensor parameter = register_parameter("parameter", torch::zeros({2}, at::kDouble));
  torch::optim::SGD sgd{{parameter}, torch::optim::SGDOptions(0.0)};  // a rate of 0 keeps the losses of the batches
};
const auto given_loss = [](Net& net, const std::pair<double, int>& batch) {
  return ga::Loss{net.parameter.sum() * batch.first + batch.first, batch.second};
};

const auto objective = [](auto& model, auto& batch) { return loss_of(model, batch); };

std::vector<std::int64_t> steps_of(const Curve& curve) {
  std::vector<std::int64_t> steps;
  for (auto& [step, number] : curve) steps.push_back(step);
  return steps;
}

std::vector<float> numbers_of(const Curve& curve) {
  std::vector<float> numbers;
  for (auto& [step, number] : curve) numbers.push_back(number);
  return numbers;
}

std::set<std::string> tags_in(const std::filesystem::path& directory) {
  std::set<std::string> tags;
  for (auto& event : events_in(directory))
    if (!event.tag.empty()) tags.insert(event.tag);
  return tags;
}

const Histogram* histogram_in(const std::vector<Event>& events, const std::string& tag, std::int64_t step) {
  const Histogram* found = nullptr;
  for (auto& event : events)
    if (event.tag == tag && event.step == step && event.histogram) found = &*event.histogram;
  return found;
}

bool are_same(const Histogram* found, const inner::ValueHistogram& expected) {
  return found && found->limits == expected.limits && found->counts == expected.numbers_below &&
         found->max == expected.max;
}

using Steps = std::vector<std::int64_t>;

/// A training that can be killed, and resumes from its states.
struct Run {
  std::filesystem::path directory, states = directory / "states", events = directory / "events";
  std::int64_t kill_at = -1;  // the update, after it is written
  std::int64_t save_every = 2;
  std::chrono::duration<double> flush_every = late;

  /// Returns the parameters; empty if it was killed.
  template <class... Policies>
  at::Tensor train(Policies... policies) {
    auto model = make_model();
    torch::optim::AdamW adamw(model->parameters(), 0.01);
    const auto batches = make_batches({4, 3, 5, 4, 2});
    const auto unseen = make_batches({3, 2});
    std::map<std::filesystem::path, std::uintmax_t> on_disk;  // at the time of the kill
    const auto killer = [&](const ga::Step& step) {
      if (step.update != kill_at) return;
      for (auto& path : event_files_in(events)) on_disk[path] = std::filesystem::file_size(path);
      throw std::runtime_error("killed");
    };
    ga::Trainer trainer(model, adamw, objective, ga::ClipNorm{.max = 1.0},
                        ga::SaveState{.directory = states, .every_updates = save_every},
                        ga::TensorBoard{.directory = events, .flush_every = flush_every},
                        ga::Validate(unseen, {.every_epochs = 1}), std::move(policies)..., killer);
    try {
      trainer.fit(batches, {.epochs = 2, .resume = states});
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "killed") throw;
      for (auto& [path, bytes] : on_disk)  // removes bytes written after the kill, up to a piece
        std::filesystem::resize_file(path, std::min(bytes + 7, std::filesystem::file_size(path)));
      return {};
    }
    return flat(model);
  }
};

}  // namespace

TEST_CASE("TensorBoard: writes a point for each update") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::Accumulate{.steps = 2},
                      ga::TensorBoard{.directory = directory / "run"});
  trainer.fit(Batches{{1.0, 1}, {2.0, 3}, {0.5, 2}}, {.epochs = 2});
  const auto curves = curves_in(directory / "run");
  CHECK(curves.at("train/loss") == Curve{{1, 1.75F}, {2, 0.5F}, {3, 1.75F}, {4, 0.5F}});
  CHECK(curves.at("train/lr") == Curve{{1, 0}, {2, 0}, {3, 0}, {4, 0}});
  CHECK(steps_of(curves.at("train/samples_per_second")) == Steps{1, 2, 3, 4});
  for (const float rate : numbers_of(curves.at("train/samples_per_second"))) CHECK(rate > 0);
  CHECK(steps_of(curves.at("memory/resident")).front() == 1);  // at most twice a second
  for (const float bytes : numbers_of(curves.at("memory/resident"))) CHECK(bytes > (1 << 20));
  CHECK(curves.count("train/grad_norm") == 0);  // without clipping
  CHECK(tags_in(directory / "run") ==
        std::set<std::string>{"train/loss", "train/lr", "train/samples_per_second", "memory/resident"});
}

TEST_CASE("TensorBoard: writes the norm before clipping, and the rate of a schedule") {
  const Directory directory;
  Net net;
  torch::optim::SGD sgd({net.parameter}, 0.25);
  ga::Trainer trainer(net, sgd, given_loss, ga::TensorBoard{.directory = directory / "run"}, ga::ClipNorm{.max = 0.01},
                      ga::Schedule{[](std::int64_t update) { return update == 0 ? 0.5 : 0.25; }});
  trainer.fit(Batches{{1.0, 1}, {3.0, 1}});
  const auto curves = curves_in(directory / "run");
  CHECK(numbers_of(curves.at("train/grad_norm")) ==
        std::vector<float>{static_cast<float>(std::sqrt(2.0)), static_cast<float>(3 * std::sqrt(2.0))});
  CHECK(curves.at("train/lr") == Curve{{1, 0.5F}, {2, 0.25F}});
}

TEST_CASE("TensorBoard: skipped windows have no point, and NaN has one") {
  const Directory directory;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"});
  trainer.fit(Batches{{1.0, 1}, {2.0, 0}, {nan, 1}, {4.0, 1}}, {.on_nan = ga::OnNan::ignore});
  const auto loss = curves_in(directory / "run").at("train/loss");
  CHECK(steps_of(loss) == Steps{1, 2, 3});
  CHECK(loss[0].second == 1);
  CHECK(std::isnan(loss[1].second));
}

TEST_CASE("TensorBoard: points at intervals, and over several fits") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run", .every = 3});
  trainer.fit(Batches(4, {1.0, 1}));
  trainer.fit(Batches(4, {2.0, 1}));
  CHECK(curves_in(directory / "run").at("train/loss") == Curve{{3, 1}, {6, 2}});
  CHECK(event_files_in(directory / "run").size() == 1);
}

TEST_CASE("TensorBoard: a user's loop") {
  const Directory directory;
  Net net;
  {
    ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"});
    for (auto& batch : Batches{{1.0, 1}, {2.0, 1}}) trainer.step(batch);
  }
  CHECK(curves_in(directory / "run").at("train/loss") == Curve{{1, 1}, {2, 2}});
}

TEST_CASE("TensorBoard: hyperparameters, and a user's numbers") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss,
                      ga::TensorBoard{.directory = directory / "run", .hyperparameters = "| lr | 0 |"});
  CHECK(std::filesystem::is_empty(directory / "run"));
  trainer.fit(Batches{{1.0, 1}});
  trainer.policy<ga::TensorBoard>().writer()->add_scalar("test/loss", 0.5, trainer.updates());
  trainer.policy<ga::TensorBoard>().writer()->flush();
  const auto events = events_in(directory / "run");
  REQUIRE(events.size() > 1);
  CHECK(events[1].tag == "hyperparameters/text_summary");
  CHECK(events[1].text == "| lr | 0 |");
  CHECK(events[1].step == 0);
  CHECK_FALSE(events[1].starts);
  CHECK(events.back().tag == "test/loss");
  CHECK(events.back().step == 1);
}

TEST_CASE("TensorBoard: results of validations") {
  const Directory directory;
  Net net;
  const Batches unseen{{0.25, 1}, {0.75, 1}};
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"},
                      ga::Validate(unseen, {.every_updates = 2}), ga::Validate(unseen, {.name = "größe"}));
  trainer.fit(Batches{{1.0, 1}, {2.0, 1}, {3.0, 1}, {4.0, 1}, {5.0, 1}});
  const auto curves = curves_in(directory / "run");
  CHECK(curves.at("validation/loss") == Curve{{2, 0.5F}, {4, 0.5F}, {5, 0.5F}});
  CHECK(curves.at("größe/loss") == Curve{{5, 0.5F}});
  CHECK(steps_of(curves.at("train/samples_per_second")) == Steps{1, 2, 3, 4, 5});
}

TEST_CASE("TensorBoard: histograms of the unscaled gradients, and of the parameters after the step") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const auto batches = make_batches({4, 4, 4, 4});
  ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2},
                      ga::TensorBoard{.directory = directory / "run", .histograms_every = 2},
                      ga::ClipNorm{.max = 1e-3});
  trainer.fit(batches);

  auto plain = make_model();
  torch::optim::SGD other(plain->parameters(), 0.1);
  ga::GradAccumulator optimizer(other, {.steps = 2});
  std::map<std::string, inner::ValueHistogram> gradients;
  for (auto& batch : batches) {
    optimizer.backward(loss_of(plain, batch));
    if (optimizer.ready()) {
      optimizer.gradients().values();
      for (auto& item : plain->named_parameters()) gradients[item.key()] = inner::histogram_of(item.value().grad());
      optimizer.clip_grad_norm_(1e-3);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto events = events_in(directory / "run");
  for (auto& item : model->named_parameters()) {
    INFO(item.key());
    CHECK(are_same(histogram_in(events, "parameters/" + item.key(), 2), inner::histogram_of(item.value())));
    CHECK(are_same(histogram_in(events, "gradients/" + item.key(), 2), gradients.at(item.key())));
    CHECK_FALSE(histogram_in(events, "gradients/" + item.key(), 1));
  }
  CHECK_FALSE(are_same(histogram_in(events, "gradients/0.weight", 2),
                       inner::histogram_of(make_model()->parameters()[0])));  // negative control
}

TEST_CASE("TensorBoard: the training is bitwise the same without it") {
  const auto train = [](const std::filesystem::path& directory, auto optimizer, at::ScalarType dtype,
                        std::int64_t histograms_every) {
    auto model = make_model(dtype);
    auto adamw = optimizer(model);
    const auto batches = make_batches({4, 3, 5, 4, 2, 1}, dtype);
    std::optional<ga::TensorBoard> board;
    if (histograms_every >= 0) board = ga::TensorBoard{.directory = directory, .histograms_every = histograms_every};
    ga::Trainer trainer(model, adamw, objective, ga::Accumulate{.steps = 3, .accumulate_in = at::kFloat}, board,
                        ga::ClipNorm{.max = 0.5});
    trainer.fit(batches, {.epochs = 3});
    return flat(model);
  };
  const Directory directory;
  const auto ours = [](auto& model) { return ga::optim::AdamW(model->parameters(), 0.01); };
  const auto theirs = [](auto& model) { return torch::optim::AdamW(model->parameters(), 0.01); };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    CHECK(train(directory / "a", ours, dtype, 1).equal(train({}, ours, dtype, -1)));
    CHECK(train(directory / "b", theirs, dtype, 1).equal(train({}, theirs, dtype, -1)));
  }
  CHECK(tags_in(directory / "a").count("gradients/2.bias") == 1);
}

TEST_CASE("TensorBoard: a step that overflows has no histogram") {
  const Directory directory;
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::Trainer trainer(
      model, sgd,
      [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data).to(at::kFloat), batch.target); },
      ga::MixedPrecision{.dtype = at::kHalf, .scaler = {.init_scale = 65536.0 * 65536.0 * 256}},
      ga::TensorBoard{.directory = directory / "run", .histograms_every = 1});
  const auto report = trainer.fit(make_batches({4, 4, 4, 4}, at::kFloat), {.epochs = 20});
  REQUIRE(report.skipped > 0);
  REQUIRE(report.updates > 0);
  Steps expected;
  for (std::int64_t step = 1; step <= report.updates; ++step) expected.push_back(step);
  CHECK(steps_of(curves_in(directory / "run").at("train/loss")) == expected);
  Steps found;
  for (auto& event : events_in(directory / "run"))
    if (event.tag == "gradients/0.weight") found.push_back(event.step);
  CHECK(found == expected);
  CHECK(tags_in(directory / "run").count("gradients/0.weight/not_finite") == 0);
}

TEST_CASE("TensorBoard: a parameter outside of the module is numbered") {
  const Directory directory;
  Net net;
  auto other = torch::ones({2}, at::kDouble).set_requires_grad(true);
  torch::optim::SGD sgd({net.parameter, other}, 0.1);
  ga::Trainer trainer(
      net, sgd, [&](Net& with, auto& batch) { return (with.parameter * other).sum() * batch.first; },
      ga::TensorBoard{.directory = directory / "run", .histograms_every = 1});
  trainer.fit(Batches{{1.0, 1}});
  const auto tags = tags_in(directory / "run");
  for (const auto* tag :
       {"parameters/parameter", "gradients/parameter", "parameters/parameter_1", "gradients/parameter_1"})
    CHECK(tags.count(tag) == 1);
}

TEST_CASE("TensorBoard: works with OptimizerInBackward, without histograms") {
  const Directory directory;
  auto model = make_model();
  ga::optim::AdamW adamw(model->parameters(), 0.01);
  const auto batches = make_batches({4, 4});
  {
    ga::Trainer trainer(model, adamw, objective, ga::OptimizerInBackward{},
                        ga::TensorBoard{.directory = directory / "run"});
    trainer.fit(batches);
    CHECK(curves_in(directory / "run").at("train/loss").size() == 2);
  }
  ga::Trainer trainer(model, adamw, objective, ga::OptimizerInBackward{},
                      ga::TensorBoard{.directory = directory / "other", .histograms_every = 100});
  REQUIRE_ERROR("turn in_backward off", trainer.fit(batches));  // in the first window, not in the hundredth
}

TEST_CASE("TensorBoard: nothing is written in a smoke fit") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss,
                      ga::TensorBoard{.directory = directory / "run", .hyperparameters = "none"},
                      ga::Validate(Batches{{1.0, 1}}));
  trainer.fit(Batches(3, {1.0, 1}), {.smoke = true});
  CHECK(std::filesystem::is_empty(directory / "run"));
  trainer.fit(Batches(3, {1.0, 1}));  // continues from that update
  CHECK(steps_of(curves_in(directory / "run").at("train/loss")) == Steps{2, 3, 4});
}

TEST_CASE("TensorBoard: a killed and resumed training has the curves of an uninterrupted one") {
  const Directory directory;
  Run whole{.directory = directory / "whole"};
  const auto expected = whole.train();
  const auto curves = curves_in(whole.events);
  REQUIRE(steps_of(curves.at("train/loss")) == Steps{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  REQUIRE(steps_of(curves.at("validation/loss")) == Steps{5, 10});
  for (const std::int64_t save_every : {2, 3, 5})
    for (const std::int64_t kill_at : {1, 4, 5, 6, 9, 10}) {
      INFO("saved every " << save_every << ", killed at " << kill_at);
      Run run{.directory = directory / "killed", .kill_at = kill_at, .save_every = save_every};
      if (kill_at % 2 == 0) run.flush_every = std::chrono::seconds(0);
      REQUIRE_FALSE(run.train().defined());
      run.kill_at = 9;
      run.train();  // some are killed twice
      run.kill_at = -1;
      CHECK(run.train().equal(expected));
      const auto found = curves_in(run.events);
      for (const auto* tag : {"train/loss", "train/grad_norm", "train/lr", "validation/loss"}) {
        INFO(tag);
        CHECK(found.at(tag) == curves.at(tag));
      }
      const auto *const rate = "train/samples_per_second", *const memory = "memory/resident";
      CHECK(steps_of(found.at(rate)) == steps_of(curves.at(rate)));
      CHECK(steps_of(found.at(memory)).front() == steps_of(curves.at(memory)).front());
      std::filesystem::remove_all(run.directory);
    }
}

TEST_CASE("TensorBoard: the files of a killed training overlap") {
  const Directory directory;
  Run run{.directory = directory / "killed", .kill_at = 6, .save_every = 4, .flush_every = std::chrono::seconds(0)};
  REQUIRE_FALSE(run.train().defined());
  run.kill_at = -1;
  CHECK(run.train().defined());
  std::multiset<std::int64_t> steps;
  for (auto& path : event_files_in(run.events))
    for (auto& event : events_of(text_of(path)))
      if (event.tag == "train/loss") steps.insert(event.step);
  CHECK(steps.count(4) == 1);
  CHECK(steps.count(5) == 2);
  CHECK(steps.count(6) == 2);
  CHECK(steps_of(curves_in(run.events).at("train/loss")) == Steps{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
}

TEST_CASE("TensorBoard: a repeated validation occurs once") {
  // The state of update 5 is older than the validation at the end of its epoch.
  const Directory directory;
  Run run{.directory = directory / "run", .kill_at = 7, .save_every = 5, .flush_every = std::chrono::seconds(0)};
  REQUIRE_FALSE(run.train().defined());
  CHECK(steps_of(curves_in(run.events).at("validation/loss")) == Steps{5});
  run.kill_at = -1;
  CHECK(run.train().defined());
  CHECK(steps_of(curves_in(run.events).at("validation/loss")) == Steps{5, 10});
}

TEST_CASE("TensorBoard: killed before the first state, it starts again") {
  const Directory directory;
  Run run{.directory = directory / "run", .kill_at = 3, .save_every = 100};
  REQUIRE_FALSE(run.train().defined());
  run.kill_at = -1;
  CHECK(run.train().defined());
  CHECK(steps_of(curves_in(run.events).at("train/loss")) == Steps{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
}

TEST_CASE("TensorBoard: all points are on the disk before a state is") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run", .flush_every = late});
  trainer.step(std::pair(1.0, 1));
  trainer.step(std::pair(2.0, 1));
  CHECK(curves_in(directory / "run").empty());
  ga::Archive saved;
  trainer.state(saved);
  CHECK(curves_in(directory / "run").at("train/loss").size() == 2);
}

TEST_CASE("TensorBoard: loading a state by hand continues after it, and hides nothing until new points are written") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"});
  trainer.fit(Batches(2, {1.0, 1}));
  ga::Archive saved;
  trainer.state(saved);
  trainer.fit(Batches(2, {2.0, 1}));
  ga::Archive loading(saved.values());
  trainer.state(loading);
  auto& board = trainer.policy<ga::TensorBoard>();
  board.writer()->add_scalar("test/loss", 0.5, trainer.updates());
  board.writer()->flush();
  CHECK(curves_in(directory / "run").at("train/loss") == Curve{{1, 1}, {2, 1}, {3, 2}, {4, 2}});
  CHECK(curves_in(directory / "run").at("test/loss") == Curve{{2, 0.5F}});
  trainer.fit(Batches{{3.0, 1}});
  CHECK(curves_in(directory / "run").at("train/loss") == Curve{{1, 1}, {2, 1}, {3, 3}});
  CHECK(curves_in(directory / "run").at("test/loss") == Curve{{2, 0.5F}});
}

TEST_CASE("TensorBoard: an incompatible state changes nothing") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"});
  trainer.fit(Batches(2, {1.0, 1}));
  auto other = make_model();
  torch::optim::SGD sgd(other->parameters(), 0.1);
  ga::Trainer stranger(other, sgd, objective, ga::TensorBoard{.directory = directory / "other"});
  ga::Archive saved;
  stranger.state(saved);
  ga::Archive loading(saved.values());
  CHECK_THROWS(trainer.state(loading));
  trainer.fit(Batches{{2.0, 1}});
  CHECK(curves_in(directory / "run").at("train/loss") == Curve{{1, 1}, {2, 1}, {3, 2}});
  CHECK(event_files_in(directory / "run").size() == 1);
}

TEST_CASE("TensorBoard: states do not contain it, and can be loaded with and without it") {
  const Directory directory;
  ga::Archive with, without;
  Net net;
  {
    ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run"});
    trainer.fit(Batches(2, {1.0, 1}));
    trainer.state(with);
  }
  ga::Trainer trainer(net, net.sgd, given_loss);
  ga::Archive loading(with.values());
  trainer.state(loading);
  loading.check_all_used();
  trainer.state(without);
  CHECK(with.values().size() == without.values().size());
  ga::Trainer again(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "again"});
  ga::Archive second(without.values());
  again.state(second);
  again.fit(Batches(1, {1.0, 1}));
  CHECK(steps_of(curves_in(directory / "again").at("train/loss")) == Steps{3});
}

TEST_CASE("TensorBoard: points before an exception are on the disk") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::TensorBoard{.directory = directory / "run", .flush_every = late},
                      [](const ga::Step& step) {
                        if (step.update == 2) throw std::runtime_error("enough");
                      });
  CHECK_THROWS(trainer.fit(Batches(3, {1.0, 1})));
  CHECK(steps_of(curves_in(directory / "run").at("train/loss")) == Steps{1, 2});
}

TEST_CASE("TensorBoard: a full disk ends the fit with the file's name, and the trainer can be used again") {
  const Directory directory;
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss,
                      ga::TensorBoard{.directory = directory / "run", .flush_every = std::chrono::seconds(0)});
  trainer.fit(Batches{{1.0, 1}});
  const auto path = trainer.policy<ga::TensorBoard>().writer()->path();
  {
    const FileSizeLimit full(std::filesystem::file_size(path) + 60);
    REQUIRE_ERROR(path.string() + ": must be written to, got File too large", trainer.fit(Batches(3, {2.0, 1})));
    CHECK(records_of(text_of(path)).all);
    CHECK(trainer.window().micro_batches == 0);
  }
  trainer.fit(Batches{{3.0, 1}});
  const auto loss = curves_in(directory / "run").at("train/loss");
  CHECK(loss.front() == std::pair<std::int64_t, float>(1, 1));
  CHECK(loss.back() == std::pair<std::int64_t, float>(trainer.updates(), 3));
}

TEST_CASE("TensorBoard: rank 0 writes the means over all ranks' samples") {
  const Directory directory;
  std::vector<int> writers(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    const auto own = directory / std::to_string(group.rank());
    ga::Trainer trainer(model, sgd, objective, ga::TensorBoard{.directory = own, .histograms_every = 1},
                        ga::DataParallel{.group = group, .options = {.seed_by_rank = false}});
    trainer.fit(make_batches({4, 4, 4}));
    writers[static_cast<std::size_t>(group.rank())] = trainer.policy<ga::TensorBoard>().writer() ? 1 : 0;
  });
  CHECK(writers == std::vector<int>{1, 0});
  CHECK(steps_of(curves_in(directory / "0").at("train/loss")) == Steps{1, 2, 3});
  CHECK(tags_in(directory / "0").count("gradients/0.weight") == 1);
  CHECK_FALSE(std::filesystem::exists(directory / "1"));
}

TEST_CASE("TensorBoard: invalid options are refused when the trainer is built") {
  const Directory directory;
  Net net;
  const auto build = [&](ga::TensorBoard board) { ga::Trainer(net, net.sgd, given_loss, std::move(board)); };
  REQUIRE_ERROR("TensorBoard: directory must be given", build({}));
  REQUIRE_ERROR("TensorBoard: every must be >= 1, got 0", build({.directory = directory / "run", .every = 0}));
  REQUIRE_ERROR("TensorBoard: histograms_every must be >= 0, got -1",
                build({.directory = directory / "run", .histograms_every = -1}));
  REQUIRE_ERROR("TensorBoard: flush_every must be >= 0 seconds, got -1",
                build({.directory = directory / "run", .flush_every = std::chrono::seconds(-1)}));
  CHECK_FALSE(std::filesystem::exists(directory / "run"));
  write_text(directory / "file", "");
  REQUIRE_ERROR((directory / "file").string() + ": must be a directory", build({.directory = directory / "file"}));
  REQUIRE_ERROR("/proc/run: must be a directory, or one that can be created", build({.directory = "/proc/run"}));
}

TEST_CASE("TensorBoard: writes histograms of a model on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto train = [](at::Device device, const std::filesystem::path& directory) {
    auto model = make_model(at::kFloat);
    model->to(device);
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(
        model, sgd,
        [device](auto& net, auto& batch) {
          return torch::mse_loss(net->forward(batch.data.to(device)), batch.target.to(device));
        },
        ga::TensorBoard{.directory = directory, .histograms_every = 1});
    trainer.fit(make_batches({4, 4}, at::kFloat));
    return events_in(directory);
  };
  const Directory directory;
  const auto there = train(at::Device(at::kCUDA, 0), directory / "device"), here = train(at::kCPU, directory / "cpu");
  std::size_t histograms = 0;
  for (auto& event : here) {
    if (!event.histogram) continue;
    const auto* const other = histogram_in(there, event.tag, event.step);
    REQUIRE(other);
    CHECK(other->num == event.histogram->num);
    CHECK(other->max == Approx(event.histogram->max).margin(1e-4));
    ++histograms;
  }
  CHECK(histograms == 2 * 2 * 4);
}
