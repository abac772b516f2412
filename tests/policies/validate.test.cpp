// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"
#include "support/warnings.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

const auto objective = [](auto& model, auto& batch) {
  auto output = model->forward(batch.data);
  auto loss = torch::cross_entropy_loss(output, batch.target);
  return ga::Loss{loss, batch.target.size(0)}.with(output, batch.target);
};

struct Data {
  at::Tensor inputs, targets;
  explicit Data(std::int64_t rows, std::uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    inputs = at::randn({rows, 4}, generator, at::kDouble);
    targets = at::randint(3, {rows}, generator, at::kLong);
  }
  ga::data::TensorBatches share(const ga::ProcessGroup& group) const {
    return ga::data::TensorBatches(inputs, targets,
                                   {.batch_size = 2, .rank = group.rank(), .world_size = group.world_size()});
  }
};

/// A model with dropout, an optimizer with state, and batches.
struct Scene {
  Data data{22, 1}, unseen{10, 2};
  ga::data::TensorBatches batches{data.inputs, data.targets, {.batch_size = 4, .shuffle = true}};
  ga::data::TensorBatches validation{unseen.inputs, unseen.targets, {.batch_size = 3, .shuffle = true, .seed = 9}};
  torch::nn::Sequential model = make();
  torch::optim::Adam adam{model->parameters(), torch::optim::AdamOptions(0.05)};

  static torch::nn::Sequential make() {
    torch::manual_seed(7);
    torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Dropout(0.3), torch::nn::Linear(8, 3));
    model->to(at::kDouble);
    return model;
  }
};

std::vector<std::int64_t> updates_of(const ga::FitReport& report) {
  std::vector<std::int64_t> updates;
  for (auto& validation : report.validations) updates.push_back(validation.update);
  return updates;
}

std::vector<double> losses_of(const ga::FitReport& report) {
  std::vector<double> losses;
  for (auto& validation : report.validations) losses.push_back(validation.found["loss"]);
  return losses;
}

using Updates = std::vector<std::int64_t>;

/// A policy: passes on made-up evaluations.
struct Told {
  std::vector<double> losses;
  std::size_t next = 0;
  std::function<void(double)> tell = {};

  void attach(ga::TrainerBase& trainer) {
    trainer.will_validate("validation", {"loss"});
    tell = [&trainer](double loss) { trainer.validated("validation", {.metrics = {{"loss", loss}}}); };
  }
  void after_step(const ga::Step&) { due = true; }
  void before_boundary() {
    if (std::exchange(due, false) && next < losses.size()) tell(losses[next++]);
  }
  bool due = false;
};

struct Killed {};

/// A policy: ends the training like a kill after the policies before it have saved this update.
struct Kill {
  std::int64_t at = -1;
  ga::TrainerBase* trainer = nullptr;

  void attach(ga::TrainerBase& to) { trainer = &to; }
  void at_boundary() const {
    if (trainer->updates() == at) throw Killed();
  }
};

}  // namespace

TEST_CASE("Validate: finds the results of evaluate, and does not change the training, to the bit") {
  Scene plain, validated;
  ga::Trainer without(plain.model, plain.adam, objective, ga::Accumulate{.steps = 2});
  torch::manual_seed(3);
  without.fit(plain.batches, {.epochs = 3});

  std::vector<double> expected;
  ga::Trainer trainer(validated.model, validated.adam, objective, ga::Accumulate{.steps = 2},
                      ga::Validate(validated.validation, {.every_updates = 2}, ga::Accuracy{}),
                      [&](const ga::Step& step) {
                        if (step.update % 2 != 0) return;
                        validated.model->eval();
                        const torch::NoGradGuard no_grad;
                        const auto output = validated.model->forward(validated.unseen.inputs);
                        expected.push_back(torch::cross_entropy_loss(output, validated.unseen.targets).item<double>());
                        validated.model->train();
                      });
  torch::manual_seed(3);
  const auto report = trainer.fit(validated.batches, {.epochs = 3});
  CHECK(at::equal(flat(validated.model), flat(plain.model)));
  CHECK(updates_of(report) == Updates{2, 4, 6, 8, 9});  // 3 windows per epoch
  REQUIRE(expected.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(report.validations[i].found["loss"] == Approx(expected[i]).epsilon(1e-12));
    CHECK(report.validations[i].found.samples == 10);
    CHECK(report.validations[i].found.metrics.contains("accuracy"));
  }
  CHECK(report.validations[0].found["loss"] != report.validations[1].found["loss"]);
  CHECK(report.validations[3].epoch == 2);
  CHECK(report.validations[3].samples == 44 + 16);
}

TEST_CASE("Validate: at the end of epochs, and at each update once") {
  const auto updates = [](ga::ValidateOptions options) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2},
                        ga::Validate(scene.validation, options));
    return updates_of(trainer.fit(scene.batches, {.epochs = 4}));
  };
  CHECK(updates({}) == Updates{3, 6, 9, 12});
  CHECK(updates({.every_epochs = 3}) == Updates{9, 12});  // and at the end
  CHECK(updates({.every_updates = 3, .every_epochs = 1}) == Updates{3, 6, 9, 12});
  CHECK(updates({.every_updates = 4, .every_epochs = 2}) == Updates{4, 6, 8, 12});
}

TEST_CASE("Validate: the last one is of fit's final parameters, once") {
  const auto updates = [](ga::FitOptions options, std::int64_t stop_after = -1) {
    Scene scene;
    ga::TrainerBase* base = nullptr;
    std::int64_t batches = 0;
    struct Stop {
      ga::TrainerBase*& base;
      std::int64_t &batches, after;
      void attach(ga::TrainerBase& to) { base = &to; }
      void after_backward(ga::Gradients&) {
        if (++batches == after) base->stop("enough");
      }
    };
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2}, Stop{base, batches, stop_after},
                        ga::Validate(scene.validation, {.every_updates = 100}));
    const auto report = trainer.fit(scene.batches, options);
    if (!report.validations.empty()) {
      const auto last = trainer.evaluate(scene.validation)["loss"];
      CHECK(report.validations.back().found["loss"] == Approx(last).epsilon(1e-12));
    }
    return updates_of(report);
  };
  CHECK(updates({.epochs = 2}) == Updates{6});
  CHECK(updates({.updates = 4}) == Updates{4});
  CHECK(updates({.samples = 30}) == Updates{4});
  CHECK(updates({.updates = 0}).empty());
  CHECK(updates({.epochs = 9}, 3) == Updates{2});  // in the middle of a window, which is flushed
  CHECK(updates({.epochs = 9, .tail = ga::Tail::carry}, 3) == Updates{1});
  CHECK(updates({.epochs = 9, .tail = ga::Tail::drop}, 3) == Updates{1});
}

TEST_CASE("Validate: evaluates the averages, and then restores the parameters") {
  Scene scene, other;
  std::vector<double> averaged, own;
  const auto loss = [](Scene& scene) {
    const torch::NoGradGuard no_grad;
    scene.model->eval();
    const auto output = scene.model->forward(scene.unseen.inputs);
    scene.model->train();
    return torch::cross_entropy_loss(output, scene.unseen.targets).item<double>();
  };
  ga::Trainer trainer(scene.model, scene.adam, objective, ga::Ema{.decay = 0.5},
                      ga::Validate(scene.validation, {.every_updates = 3, .ema = true}));
  torch::manual_seed(3);
  const auto report = trainer.fit(scene.batches, {.epochs = 1});
  own.push_back(loss(scene));
  ga::Trainer plain(other.model, other.adam, objective);
  torch::manual_seed(3);
  plain.fit(other.batches, {.epochs = 1});
  CHECK(at::equal(flat(scene.model), flat(other.model)));
  trainer.policy<ga::Ema>().swap(scene.model);
  averaged.push_back(loss(scene));
  REQUIRE(updates_of(report) == Updates{3, 6});
  CHECK(losses_of(report)[1] == Approx(averaged[0]).epsilon(1e-12));
  CHECK(losses_of(report)[1] != Approx(own[0]).epsilon(1e-6));
  CHECK_THROWS_WITH(ga::Trainer(other.model, other.adam, objective, ga::Validate(other.validation, {.ema = true})),
                    Catch::Contains("Validate: ema needs the averages"));
}

TEST_CASE("Validate: if evaluating throws, parameters and random numbers are restored") {
  Scene scene;
  bool fail = true;
  const auto failing = [&](auto& model, auto& batch) {
    if (!model->is_training()) {
      torch::rand({3});
      if (fail) throw std::runtime_error("no such batch");
    }
    return objective(model, batch);
  };
  ga::Trainer trainer(scene.model, scene.adam, failing, ga::Ema{.decay = 0.5},
                      ga::Validate(scene.validation, {.every_updates = 2, .ema = true}));
  CHECK_THROWS_WITH(trainer.fit(scene.batches), "no such batch");
  CHECK(scene.model->is_training());
  const auto after = torch::rand({1});
  Scene plain;
  ga::Trainer without(plain.model, plain.adam, objective, ga::Ema{.decay = 0.5});
  without.fit(plain.batches, {.updates = 2});
  CHECK(at::equal(flat(scene.model), flat(plain.model)));
  CHECK(at::equal(torch::rand({1}), after));
  fail = false;
  CHECK(trainer.fit(scene.batches).validations.size() == 3);
}

TEST_CASE("Validate: several with different names") {
  Scene scene;
  const Data seen(6, 3);
  ga::Trainer trainer(scene.model, scene.adam, objective, ga::Validate(scene.validation),
                      ga::Validate(ga::data::TensorBatches(seen.inputs, seen.targets, {.batch_size = 6}),
                                   {.every_updates = 4, .name = "test"}, ga::Accuracy{}));
  const auto report = trainer.fit(scene.batches);
  REQUIRE(report.validations.size() == 3);  // the last of "test" is at the end
  CHECK(report.validations[0].name == "test");
  CHECK(report.validations[0]["test/accuracy"].has_value());
  CHECK_FALSE(report.validations[0]["loss"]);
  CHECK(report.validations[1]["loss"] == report.validations[1]["validation/loss"]);
  CHECK(report.validations[1]["loss"].has_value());
  CHECK_FALSE(report.validations[1]["accuracy"]);
  std::ostringstream text;
  text << report;
  CHECK_THAT(text.str(), Catch::Contains("Last test, at update 6: accuracy: "));
  CHECK_THAT(text.str(), Catch::Contains("Last validation, at update 6: loss: "));
}

TEST_CASE("Validate: invalid options are refused") {
  Scene scene;
  const auto build = [&](ga::ValidateOptions options) {
    ga::Trainer(scene.model, scene.adam, objective, ga::Validate(scene.validation, options));
  };
  REQUIRE_ERROR("Validate: every_updates must be >= 1, got 0", build({.every_updates = 0}));
  REQUIRE_ERROR("Validate: every_epochs must be >= 1, got -1", build({.every_epochs = -1}));
  REQUIRE_ERROR("Validate: name must not be empty or contain '/', got 'a/b'", build({.name = "a/b"}));
  ga::Trainer trainer(scene.model, scene.adam, objective, ga::Validate(scene.batches));
  REQUIRE_ERROR("evaluate must not iterate over the batches that fit is iterating over", trainer.fit(scene.batches));
}

TEST_CASE("Validate: a smoke fit makes one validation of each") {
  Scene scene;
  ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2},
                      ga::Validate(scene.validation, {.every_updates = 1000}));
  const auto report = trainer.fit(scene.batches, {.smoke = true});
  REQUIRE(report.validations.size() == 1);
  CHECK(report.validations[0].found.samples == 3);
}

TEST_CASE("Validate: a resumed training has all validations once, to the bit") {
  const Directory directory;
  struct Outcome {
    ga::FitReport report;
    at::Tensor parameters;
  };
  const auto train = [&](const std::filesystem::path& states, std::int64_t kill_at, bool resume) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2},
                        ga::Validate(scene.validation, {.every_updates = 2, .every_epochs = 1}, ga::Accuracy{}),
                        ga::EarlyStopping{.patience = 100}, ga::SaveState{.directory = states, .every_updates = 1},
                        Kill{.at = kill_at});
    Outcome outcome;
    try {
      outcome.report = trainer.fit(scene.batches, {.epochs = 3, .resume = resume ? states : std::filesystem::path()});
    } catch (const Killed&) {
    }
    outcome.parameters = flat(scene.model).clone();
    return outcome;
  };
  const auto whole = train(directory / "whole", -1, false);
  CHECK(updates_of(whole.report) == Updates{2, 3, 4, 6, 8, 9});
  for (const std::int64_t kill_at : {1, 2, 3, 5, 6, 8}) {
    const auto states = directory / std::to_string(kill_at);
    const auto killed = train(states, kill_at, false);
    CHECK_FALSE(at::equal(killed.parameters, whole.parameters));
    const auto resumed = train(states, -1, true);
    CHECK(updates_of(resumed.report) == updates_of(whole.report));
    CHECK(losses_of(resumed.report) == losses_of(whole.report));
    CHECK(at::equal(resumed.parameters, whole.parameters));
  }
}

namespace {

/// Sends this process a signal at one of its batches.
struct Signals {
  static constexpr std::string_view name = "signals";
  std::int64_t at = -1;
  std::int64_t* seen = nullptr;
  void reset() {}
  void add(const ga::Loss&) const {
    if (++*seen == at) std::raise(SIGUSR1);
  }
  void reduce(ga::SumOfRanks) const {}
  double value() const { return 0; }
};

}  // namespace

TEST_CASE("Validate: a signal ends it at its next batch, and a resumed run evaluates again") {
  const Directory directory;
  const auto options = GENERATE(ga::ValidateOptions{.every_updates = 2}, ga::ValidateOptions{.every_epochs = 1});
  const auto train = [&](const std::filesystem::path& states, std::int64_t signal_at, bool resume, std::int64_t& seen) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2},
                        ga::Validate(scene.validation, options, Signals{.at = signal_at, .seen = &seen}),
                        ga::SaveState{.directory = states, .on_signals = {SIGUSR1}});
    return trainer.fit(scene.batches, {.epochs = 3, .resume = resume ? states : std::filesystem::path()});
  };
  std::int64_t all = 0;
  const auto whole = train(directory / "whole", -1, false, all);
  const auto validations = static_cast<std::int64_t>(whole.validations.size()), batches = all / validations;
  REQUIRE(batches == 4);
  for (std::int64_t number = 0; number < validations; ++number) {
    const auto states = directory / std::to_string(number);
    std::int64_t seen = 0;
    const auto stopped = train(states, number * batches + 2, false, seen);
    CHECK(stopped.signal == SIGUSR1);
    CHECK(seen == number * batches + 2);
    CHECK(std::ssize(stopped.validations) == number);
    const auto resumed = train(states, -1, true, seen);
    CHECK(updates_of(resumed) == updates_of(whole));
    CHECK(losses_of(resumed) == losses_of(whole));
    CHECK(seen == all + 2);
  }
}

TEST_CASE("Validate: a signal to one rank ends it on all") {
  const Data data(16, 1), unseen(8, 2);
  const Directory directory;
  std::vector<ga::FitReport> ranks(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto batches = data.share(group), validation = unseen.share(group);
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.05));
    std::int64_t seen = 0;
    ga::Trainer trainer(model, sgd, objective, ga::DataParallel{.group = group},
                        ga::Validate(validation, Signals{.at = group.rank() == 1 ? 1 : -1, .seen = &seen}),
                        ga::SaveState{.directory = directory / "states", .on_signals = {SIGUSR1}});
    ranks[static_cast<std::size_t>(group.rank())] = trainer.fit(batches, {.epochs = 2});
  });
  for (auto& rank : ranks) {
    CHECK(rank.signal == SIGUSR1);
    CHECK(rank.epochs == 1);
    CHECK(rank.validations.empty());
  }
}

TEST_CASE("Validate: the state of many validations, and of none") {
  std::vector<ga::Validation> all(3), loaded(1);
  all[0] = {.name = "a", .update = 3, .epoch = 1, .samples = 70, .seconds = 0.1};
  all[0].found = {.metrics = {{"loss", 0.1}, {"x", std::numeric_limits<double>::infinity()}}, .items = 2.5};
  all[1].found.metrics["loss"] = std::nan("");
  ga::Archive archive;
  archive("all", ga::detail::ValidationHistory{all});
  ga::Archive(archive.values())("all", ga::detail::ValidationHistory{loaded});
  REQUIRE(loaded.size() == 3);
  CHECK(loaded[0].name == "a");
  CHECK(loaded[0].samples == 70);
  CHECK(loaded[0].found.metrics == all[0].found.metrics);
  CHECK(loaded[0].found.items == 2.5);
  CHECK(std::isnan(loaded[1].found["loss"]));
  CHECK(loaded[2].found.metrics.empty());

  auto values = archive.values();
  values["all.number"] = std::int64_t{1} << 60;
  CHECK_THROWS(ga::Archive(values)("all", ga::detail::ValidationHistory{loaded}));
  CHECK(loaded.size() == 3);
  ga::Archive none;
  std::vector<ga::Validation> empty;
  none("all", ga::detail::ValidationHistory{empty});
  CHECK(none.values().empty());
  ga::Archive(none.values())("all", ga::detail::ValidationHistory{loaded});
  CHECK(loaded.empty());
}

TEST_CASE("Validate: each rank has its share, and the numbers are those of one process") {
  const Data data(22, 1), unseen(11, 2);
  const auto train = [&](const ga::ProcessGroup& group) {
    auto batches = data.share(group), validation = unseen.share(group);
    auto model = make_model();
    torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.05));
    ga::Trainer trainer(model, adam, objective, ga::Accumulate{.steps = 4 / group.world_size()},
                        ga::Validate(validation, {.every_updates = 1, .every_epochs = 1}, ga::Accuracy{}),
                        ga::EarlyStopping{.patience = 1, .min_delta = 1e3},
                        ga::DataParallel{.group = group, .options = {.seed_by_rank = false}});
    return trainer.fit(batches, {.epochs = 5});
  };
  const auto one = train(ga::ProcessGroup());
  REQUIRE(one.validations.size() == 2);  // the first counts as an improvement, the second ends the fit
  std::vector<ga::FitReport> ranks(2);
  tests::as_ranks(2,
                  [&](const ga::ProcessGroup& group) { ranks[static_cast<std::size_t>(group.rank())] = train(group); });
  for (auto& rank : ranks) {
    CHECK(rank.stopped == ranks[0].stopped);
    REQUIRE(rank.validations.size() == one.validations.size());
    for (std::size_t i = 0; i < one.validations.size(); ++i) {
      CHECK(rank.validations[i].found.samples == 11);
      CHECK(rank.validations[i].found["loss"] == ranks[0].validations[i].found["loss"]);
      CHECK(rank.validations[i].found["loss"] == Approx(one.validations[i].found["loss"]).epsilon(1e-11));
      CHECK(rank.validations[i].found["accuracy"] == Approx(one.validations[i].found["accuracy"]));
      CHECK(rank.validations[i].update == one.validations[i].update);
    }
  }
}

TEST_CASE("Validate: the last one is over all ranks, also if one has fewer batches, or stops the others") {
  struct Stop {
    std::int64_t after, batches = 0;
    ga::TrainerBase* trainer = nullptr;
    void attach(ga::TrainerBase& to) { trainer = &to; }
    void after_backward(ga::Gradients&) {
      if (++batches == after) trainer->stop("enough");
    }
  };
  const auto updates = [](std::int64_t rows_of_last, std::int64_t stop_after) {
    std::vector<Updates> found(2);
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      const bool is_last = group.rank() == 1;
      const Data data(is_last ? rows_of_last : 10, 1), unseen(6, 2);
      ga::data::TensorBatches batches(data.inputs, data.targets, {.batch_size = 2});
      ga::data::TensorBatches validation(unseen.inputs, unseen.targets, {.batch_size = 2});
      auto model = make_model();
      torch::optim::SGD sgd(model->parameters(), 0.01);
      ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group},
                          Stop{.after = is_last ? stop_after : -1}, ga::Validate(validation, {.every_updates = 100}));
      found[is_last] = updates_of(trainer.fit(batches, {.epochs = 2}));
    });
    CHECK(found[0] == found[1]);
    return found[0];
  };
  CHECK(updates(10, -1) == Updates{6});
  CHECK(updates(4, -1) == Updates{6});
  CHECK(updates(10, 5) == Updates{3});
}

namespace {

/// A metric that changes its tensors in place.
struct AbsoluteError {
  std::string_view name = "absolute_error";
  at::Tensor sum, count;
  void reset() { sum = torch::zeros({}, at::kDouble), count = sum.clone(); }
  void add(const ga::Loss& loss) {
    sum += (loss.output - loss.target).abs().sum();
    count += loss.target.numel();
  }
  void reduce(ga::SumOfRanks all) { all(sum), all(count); }
  double value() const { return (sum / count).item<double>(); }
};

const auto regression = [](auto& model, auto& batch) {
  auto output = model->forward(batch.data);
  return ga::Loss{torch::mse_loss(output, batch.target), batch.target.size(0)}.with(output, batch.target);
};

}  // namespace

TEST_CASE("Validate: a metric that changes its tensors in place starts again each time") {
  const Directory directory;
  const Data data(22, 1), unseen(11, 2);
  const auto target = [](const Data& of) { return of.inputs.sum(1, /*keepdim=*/true); };
  /// Returns the number of validations, or -1 if one is wrong.
  const auto train = [&](const ga::ProcessGroup& group, std::int64_t until, std::optional<ga::SaveState> saving) {
    const auto share = [&](const Data& of) {
      return ga::data::TensorBatches(of.inputs, target(of),
                                     {.batch_size = 2, .rank = group.rank(), .world_size = group.world_size()});
    };
    auto batches = share(data), validation = share(unseen);
    torch::nn::Linear model(4, 1);
    model->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.fill_(0.25);
    }
    torch::optim::SGD sgd(model->parameters(), 0.05);
    AbsoluteError error;
    std::vector<double> expected;
    const auto expect = [&](const ga::Step&) {
      const torch::NoGradGuard no_grad;
      expected.push_back((model->forward(unseen.inputs) - target(unseen)).abs().mean().item<double>());
    };
    const auto resume = saving ? saving->directory : std::filesystem::path();
    ga::Trainer trainer(model, sgd, regression, ga::Accumulate{.steps = 4 / group.world_size()},
                        ga::Validate(validation, {.every_updates = 1}, error), expect, ga::DataParallel{.group = group},
                        std::move(saving));
    const auto all = trainer.fit(batches, {.updates = until, .resume = resume}).validations;
    bool right = all.size() >= expected.size() && !error.count.defined();  // the given metric is unchanged
    const auto is_last = [&](double found, std::size_t back) {
      return std::abs(found - expected[expected.size() - back]) < 1e-11;
    };
    for (std::size_t i = 1; right && i <= expected.size(); ++i)
      right = is_last(all[all.size() - i].found["absolute_error"], i);
    for (int i = 0; i < 2; ++i)
      right = right && is_last(trainer.evaluate_on_all(validation, error)["absolute_error"], 1);
    return right ? static_cast<int>(all.size()) : -1;
  };
  const ga::SaveState saving{.directory = directory / "states"};
  CHECK(train(ga::ProcessGroup(), 3, saving) == 3);
  CHECK(train(ga::ProcessGroup(), 7, saving) == 7);  // resumes
  std::vector<int> found(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    found[static_cast<std::size_t>(group.rank())] = train(group, 4, std::nullopt);
  });
  CHECK(found == std::vector{4, 4});
}

TEST_CASE("Validate: a tensor metric is in the report, and is restored with it") {
  const Directory directory;
  const auto fit = [&](std::int64_t until, bool resume) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective,
                        ga::Validate(scene.validation, {.every_updates = 1}, ga::ConfusionMatrix{}),
                        ga::SaveState{.directory = directory / "states"});
    return trainer.fit(scene.batches, {.updates = until, .resume = resume ? directory / "states" : ""}).validations;
  };
  const auto first = fit(2, false), same = fit(2, true), all = fit(3, true);
  REQUIRE((same.size() == 2 && all.size() == 3));
  CHECK(all[2].found.tensors.at("confusion_matrix").sum().item<double>() == 10);
  CHECK(at::equal(same[1].found.tensors.at("confusion_matrix"), first[1].found.tensors.at("confusion_matrix")));
  CHECK((first[0].found.tensors.empty() && all[1].found.tensors.empty()));  // the last one has them
}

TEST_CASE("Validate: a limit within an epoch evaluates once, and validations that were not due do not count") {
  Scene scene;
  ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2}, ga::Validate(scene.validation));
  const auto report = trainer.fit(scene.batches, {.updates = 4});
  CHECK(updates_of(report) == Updates{3, 4});
  CHECK(report.validations.front().due);
  CHECK_FALSE(report.validations.back().due);
}

TEST_CASE("Validate: a fit that is run again with the same limit does not repeat its last validation") {
  const Directory directory;
  const auto run = [&](std::int64_t updates) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2}, ga::Validate(scene.validation),
                        ga::SaveState{.directory = directory / "states"});
    return trainer.fit(scene.batches, {.updates = updates, .resume = directory / "states"});
  };
  for (int times = 0; times < 2; ++times) {
    const auto report = run(6);  // the limit is at the end of the second epoch, which a later fit may end
    CHECK(updates_of(report) == Updates{3, 6});
    CHECK_FALSE(report.validations.back().due);
  }
  const auto report = run(9);
  CHECK(updates_of(report) == Updates{3, 6, 9});
  CHECK(report.validations[1].due);  // replaces the earlier result
}

TEST_CASE("EarlyStopping, SaveState: the metric determines which value is better") {
  const Directory directory;
  Scene scene;
  const auto build = [&](ga::EarlyStopping stopping, auto... metrics) {
    ga::Trainer trainer(
        scene.model, scene.adam, objective, stopping, ga::Validate(scene.validation, metrics...),
        ga::SaveState{
            .directory = directory / "states", .keep_best = 1, .metric = stopping.metric, .mode = stopping.mode});
    const auto mode = trainer.template policy<ga::EarlyStopping>().mode;
    CHECK(trainer.template policy<ga::SaveState>().mode == mode);
    return mode.value();
  };
  CHECK(build({}) == ga::Mode::min);
  CHECK(build({.metric = "f1"}, ga::F1{}) == ga::Mode::max);
  CHECK(build({.metric = "validation/f1", .mode = ga::Mode::max}, ga::F1{}) == ga::Mode::max);
  CHECK(build({.metric = "absolute_error", .mode = ga::Mode::min}, AbsoluteError{}) == ga::Mode::min);
  REQUIRE_ERROR("EarlyStopping: mode must be ga::Mode::max for 'f1', as its higher_is_better says, or be left out",
                build({.metric = "f1", .mode = ga::Mode::min}, ga::F1{}));
  REQUIRE_ERROR("EarlyStopping: mode must be ga::Mode::min for 'loss'", build({.mode = ga::Mode::max}));
  REQUIRE_ERROR("EarlyStopping: mode must be ga::Mode::min or ga::Mode::max for 'absolute_error'",
                build({.metric = "absolute_error"}, AbsoluteError{}));
  REQUIRE_ERROR("one of [validation/loss], got 'confusion_matrix'",
                build({.metric = "confusion_matrix"}, ga::ConfusionMatrix{}));
}

namespace {

struct Largest {
  static constexpr std::string_view name = "largest";
  double largest = 0;
  void add(const ga::Loss& loss) { largest = std::max(largest, loss.mean.item<double>()); }
  double value() const { return largest; }
};

}  // namespace

TEST_CASE("Validate: with several ranks a metric without reduce is an error on all") {
  const Data data(8, 1);
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    ga::data::TensorBatches batches(data.inputs, data.targets,
                                    {.batch_size = 2, .rank = group.rank(), .world_size = 2});
    auto unseen = batches;
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, ga::Validate(unseen, Largest{}), ga::DataParallel{.group = group});
    try {
      trainer.fit(batches);
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what();
    }
  });
  for (auto& error : errors) CHECK_THAT(error, Catch::Contains("must have a member reduce(ga::SumOfRanks)"));
}

TEST_CASE("EarlyStopping: the values decide") {
  const auto after = [](const ga::EarlyStopping& options, const std::vector<double>& numbers) {
    ga::EarlyStopping::Running stopping(options);
    std::size_t i = 0;
    for (; i < numbers.size(); ++i)
      if (stopping.add(numbers[i])) return i + 1;
    return std::size_t{0};
  };
  const auto nan = std::nan("");
  CHECK(after({.patience = 2}, {3, 2, 2.5, 1, 1, 1.5}) == 6);
  CHECK(after({.patience = 3}, {3, 2, 2.5, 1, 1, 1.5}) == 0);
  CHECK(after({.patience = 1}, {3, 2, 2}) == 3);
  CHECK(after({.patience = 2, .min_delta = 0.5}, {3, 2.9, 2.6, 1}) == 3);
  CHECK(after({.patience = 2, .min_delta = 0.5}, {3, 2.9, 2.4, 2, 1.95}) == 5);
  CHECK(after({.patience = 2}, {nan, 3, nan, nan}) == 4);
  CHECK(after({.patience = 2}, {nan, nan}) == 2);
  CHECK(after({.metric = "accuracy", .patience = 1}, {0.5, 0.6, 0.6}) == 3);
  CHECK(after({.patience = 1, .mode = ga::Mode::max}, {0.5, 0.6, 0.6}) == 3);
  CHECK(after({.patience = 1}, {0.5, 0.6, 0.6}) == 2);
  CHECK_THROWS_WITH(after({.patience = 0}, {1}), Catch::Contains("patience must be >= 1, got 0"));
  CHECK_THROWS_WITH(after({.min_delta = -1}, {1}), Catch::Contains("min_delta must be >= 0, got -1"));
  CHECK_THROWS_WITH(after({.metric = "f1"}, {1}),
                    Catch::Contains("EarlyStopping: mode must be ga::Mode::min or ga::Mode::max for"));
}

TEST_CASE("EarlyStopping: ends a fit, reports why, and does not continue when resumed") {
  const Directory directory;
  const auto fit = [&](std::vector<double> losses, std::size_t from, bool resume, std::int64_t most = 1000) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, Told{.losses = std::move(losses), .next = from},
                        ga::EarlyStopping{.patience = 2}, ga::SaveState{.directory = directory / "states"});
    return trainer.fit(scene.batches, {.updates = most, .resume = resume ? directory / "states" : ""});
  };
  const std::vector<double> losses{3, 2, 2.5, 2.25, 1};
  const auto first = fit(losses, 0, false, 3);
  CHECK(first.updates == 3);
  CHECK(first.stopped.empty());
  const auto second = fit(losses, 3, true);  // another one without improvement ends the fit
  CHECK(second.updates == 4);
  CHECK(second.stopped == "loss was best, 2, at update 2, 2 validations ago");
  const auto third = fit(losses, 4, true);
  CHECK(third.updates == 4);
  CHECK(third.samples == second.samples);
  CHECK(third.stopped == second.stopped);
  CHECK(updates_of(third) == Updates{1, 2, 3, 4});
}

TEST_CASE("EarlyStopping: a metric that no policy computes is refused when the trainer is built") {
  Scene scene;
  const auto build = [&](ga::EarlyStopping stopping) {
    ga::Trainer(scene.model, scene.adam, objective, stopping, ga::Validate(scene.validation, ga::Accuracy{}));
  };
  build({});
  build({.metric = "validation/accuracy"});
  REQUIRE_ERROR("one of [validation/accuracy, validation/loss], got 'acc'",
                build({.metric = "acc", .mode = ga::Mode::max}));
  REQUIRE_ERROR("EarlyStopping: needs a ga::Validate beside it, which computes 'loss'",
                ga::Trainer(scene.model, scene.adam, objective, ga::EarlyStopping{}));

  const Directory directory;  // of an earlier run, whose log a refusal leaves as it is
  std::ofstream(directory / "log.csv") << "loss\n0.5\n";
  REQUIRE_ERROR("got 'acc'", ga::Trainer(scene.model, scene.adam, objective, ga::Validate(scene.validation),
                                         ga::EarlyStopping{.metric = "acc", .mode = ga::Mode::max},
                                         ga::MetricsLog{.path = directory / "log.csv"}));
  CHECK(testing::text_of(directory / "log.csv") == "loss\n0.5\n");
}

TEST_CASE("SaveState: the best states are kept and can be found") {
  const Directory directory;
  const auto states = directory / "states";
  const std::vector<double> losses{5, 3, 4, 2, std::nan(""), 6, 2, 7};
  const auto fit = [&](ga::SaveState save, std::size_t from, std::int64_t until, bool resume) {
    Scene scene;
    save.directory = states;
    ga::Trainer trainer(scene.model, scene.adam, objective, Told{.losses = losses, .next = from}, save);
    trainer.fit(scene.batches, {.updates = until, .resume = resume ? states : ""});
  };
  const auto names = [&] {
    std::vector<std::string> names;
    for (auto& entry : std::filesystem::directory_iterator(states)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  };
  using Names = std::vector<std::string>;
  SECTION("one") {
    fit({.every_updates = 3, .keep_last = 1, .keep_best = 1}, 0, 6, false);
    CHECK(names() == Names{"step-000004", "step-000006"});
    fit({.every_updates = 3, .keep_last = 1, .keep_best = 1}, 6, 8, true);
    CHECK(names() == Names{"step-000004", "step-000008"});  // the seventh is equal, not better
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, Told{}, ga::SaveState{.directory = states, .keep_best = 1});
    CHECK(ga::load(states, trainer, {.best = true}).filename() == "step-000004");
    CHECK(trainer.updates() == 4);
    CHECK(ga::load(states, trainer).filename() == "step-000008");
  }
  SECTION("two, of the highest") {
    fit({.every_updates = 100, .keep_last = 1, .keep_best = 2, .mode = ga::Mode::max}, 0, 8, false);
    CHECK(names() == Names{"step-000006", "step-000008"});
  }
  SECTION("none, since all were NaN") {
    const auto nan = std::nan("");
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, Told{.losses = {nan, nan, nan}},
                        ga::EarlyStopping{.patience = 3},
                        ga::SaveState{.directory = states, .every_updates = 1, .keep_best = 1});
    CHECK(trainer.fit(scene.batches, {.updates = 9}).stopped == "loss was NaN in 3 validations");
    REQUIRE_ERROR("a validation metric that is not NaN", ga::load(states, trainer, {.best = true}));
  }
  SECTION("one that is infinite, and no other ever after") {
    const auto infinity = std::numeric_limits<double>::infinity();
    const auto warnings_of = [&](double first) {
      const Warnings warnings;
      Scene scene;
      ga::Trainer trainer(scene.model, scene.adam, objective, Told{.losses = {first, 0.5, first}},
                          ga::EarlyStopping{.mode = ga::Mode::max});
      trainer.fit(scene.batches, {.updates = 3});
      return warnings.texts();
    };
    REQUIRE(warnings_of(infinity).size() == 1);
    CHECK(warnings_of(infinity).front().find("EarlyStopping: loss is inf, so no later number can be better") == 0);
    CHECK(warnings_of(-infinity).empty());
  }
  SECTION("none, and nobody finds one") {
    fit({.every_updates = 3, .keep_last = 1}, 0, 6, false);
    CHECK(names() == Names{"step-000006"});
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective);
    REQUIRE_ERROR("must have a state with a validation metric that is not NaN for {.best = true}",
                  ga::load(states, trainer, {.best = true}));
  }
}

TEST_CASE("fit: ends after a number of samples, or a time") {
  const auto fit = [](ga::FitOptions options) {
    Scene scene;
    ga::Trainer trainer(scene.model, scene.adam, objective, ga::Accumulate{.steps = 2});
    return trainer.fit(scene.batches, options);
  };
  const auto some = fit({.samples = 30});  // 8 per window, 6 at the end of an epoch
  CHECK(some.samples == 30);
  CHECK(some.updates == 4);
  CHECK(some.stopped == "after 30 samples");
  CHECK(fit({.samples = 31}).samples == 38);
  CHECK(fit({.epochs = 1, .samples = 31}).samples == 22);
  CHECK(fit({.epochs = 1, .samples = 31}).stopped.empty());
  CHECK(fit({.samples = 0}).samples == 0);
  CHECK(fit({.time = std::chrono::nanoseconds(1)}).updates == 1);
  CHECK(fit({.time = std::chrono::nanoseconds(1)}).stopped == "after 1e-09 s");
  CHECK(fit({.updates = 2, .time = std::chrono::hours(1)}).updates == 2);
  CHECK(fit({.epochs = 2, .time = std::chrono::hours(1)}).epochs == 2);
  REQUIRE_ERROR("FitOptions: samples must be >= 0, got -1", fit({.samples = -1}));
  REQUIRE_ERROR("FitOptions: time must be >= 0 s, got -1", fit({.time = std::chrono::seconds(-1)}));
}
