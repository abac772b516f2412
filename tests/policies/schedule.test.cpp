// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/prefetch.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/optim/multi_optimizer.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

const ga::lr::Linear to_nothing{.peak = 1, .warmup = 2, .total = 0, .end = 0};

struct Rates {
  std::vector<double> rates;
  std::int64_t updates = 0;
};

/// Returns the learning rate of each update of a fit with `to_nothing`, or with this total.
template <class Batches, class... Policies>
Rates rates_of(Batches&& batches, const ga::FitOptions& options, std::optional<std::int64_t> total, Policies... more) {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 1);
  Rates found;
  auto rate = to_nothing;
  rate.total = total.value_or(0);
  ga::Trainer trainer(
      model, sgd,
      [](auto& net, auto&) {
        return net->forward(torch::ones({2, 4}, at::kDouble)).mean() * 0.01;
      },
      ga::Schedule{rate}, [&](const ga::Step& step) { found.rates.push_back(step.lr); }, std::move(more)...);
  trainer.fit(batches, options);
  found.updates = trainer.updates();
  return found;
}

ga::data::TensorBatches rows(const ga::ProcessGroup& group = {}) {
  return {torch::ones({75, 4}),
          torch::ones({75}),
          {.batch_size = 2, .shuffle = true, .rank = group.rank(), .world_size = group.world_size()}};  // 38 batches
}

/// Makes batches whose shuffled epochs have from 29 to 35 batches.
ga::data::LengthBuckets texts() {
  std::vector<at::Tensor> sequences;
  for (std::int64_t i = 0; i < 120; ++i) sequences.push_back(torch::ones({1 + i * i % 17}, at::kLong));
  return {sequences, torch::zeros({120}), {.tokens = 34, .shuffle = true, .mega_batch = 3}};
}

}  // namespace

TEST_CASE("Schedule: a missing total is that of fit's epochs and batches") {
  const auto tail = GENERATE(ga::Tail::flush, ga::Tail::drop, ga::Tail::carry);
  const ga::Accumulate eight{.steps = 8};
  const ga::FitOptions options{.epochs = 4, .tail = tail};
  const auto by_rows = rates_of(rows(), options, {}, eight);
  CHECK(by_rows.updates == (tail == ga::Tail::flush ? 20 : tail == ga::Tail::drop ? 16 : 19));
  CHECK(by_rows.rates == rates_of(rows(), options, by_rows.updates, eight).rates);
  auto sizes = texts();
  std::set<std::int64_t> different;
  for (std::int64_t epoch = 0; epoch < 4; ++epoch) different.insert(sizes.most_batches(epoch));
  CHECK(different.size() > 1);
  const auto by_texts = rates_of(texts(), options, {}, eight);
  CHECK(by_texts.rates == rates_of(texts(), options, by_texts.updates, eight).rates);
  CHECK(by_texts.rates == rates_of(ga::data::Prefetch(texts()), options, {}, eight).rates);
  CHECK(by_texts.rates.back() == 1.0 / static_cast<double>(by_texts.updates - 2));  // the last update's, decayed to 0
}

TEST_CASE("Schedule: a missing total by updates, by epochs of other windows, by a list") {
  CHECK(rates_of(rows(), {.updates = 9}, {}).rates == rates_of(rows(), {.updates = 9}, 9).rates);
  CHECK(rates_of(rows(), {.epochs = 2, .updates = 9}, {}).rates == rates_of(rows(), {.updates = 9}, 9).rates);
  CHECK(rates_of(rows(), {.epochs = 2, .updates = 99}, {}).rates == rates_of(rows(), {.epochs = 2}, 76).rates);
  const ga::Accumulate by_epoch{.schedule = {{0, 8}, {1, 19}}};
  CHECK(rates_of(rows(), {.epochs = 3}, {}, by_epoch).rates == rates_of(rows(), {.epochs = 3}, 9, by_epoch).rates);
  CHECK(rates_of(std::vector<int>(5), {}, {}).rates == rates_of(std::vector<int>(5), {}, 5).rates);
}

TEST_CASE("Schedule: a missing total cannot be predicted in all fits") {
  const std::string error = "Schedule: .total must be given";
  REQUIRE_ERROR(error, rates_of(rows(), {.samples = 20}, {}));
  REQUIRE_ERROR(error, rates_of(rows(), {.epochs = 2, .samples = 20}, {}));
  REQUIRE_ERROR(error, rates_of(rows(), {}, {}, ga::Accumulate{.batch_size = 4}));
  struct Half {
    bool ready() const { return true; }
  };
  REQUIRE_ERROR(error, rates_of(rows(), {}, {}, Half()));
  REQUIRE_ERROR("as many as the fit: give it fewer, or fit more updates", rates_of(rows(), {.updates = 1}, {}));
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 1);
  ga::Trainer trainer(
      model, sgd,
      [](auto& net, auto&) {
        return net->forward(torch::ones({2, 4}, at::kDouble)).mean();
      },
      ga::Schedule{to_nothing});
  int batch = 1;
  const auto before = model->parameters()[0].clone();
  REQUIRE_ERROR("Schedule: .total must be given to call step() outside of fit()", trainer.step(batch));
  CHECK(torch::equal(model->parameters()[0], before));
}

TEST_CASE("Schedule: a second fit continues to its own end") {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 1);
  std::vector<double> rates;
  ga::Trainer trainer(
      model, sgd,
      [](auto& net, auto&) {
        return net->forward(torch::ones({2, 4}, at::kDouble)).mean() * 0.01;
      },
      ga::Schedule{ga::lr::Linear{.peak = 1}}, [&](const ga::Step& step) { rates.push_back(step.lr); });
  trainer.fit(std::vector<int>(2), {.epochs = 2});
  trainer.fit(std::vector<int>(4));
  CHECK(rates == std::vector<double>{1, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125});
}

TEST_CASE("Schedule: a resumed fit keeps the total, and changes it with other epochs") {
  const auto by_texts = GENERATE(false, true);
  const std::int64_t stop = GENERATE(1, 3, 5, 8);
  const auto tail = GENERATE(ga::Tail::flush, ga::Tail::carry);
  const Directory directory;
  const auto fit = [&](ga::FitOptions options, std::optional<std::int64_t> total = {}, std::int64_t most = -1) {
    options.tail = tail;
    const auto policies = [&](auto batches) {
      struct Stop {
        std::int64_t most;
        ga::TrainerBase* trainer = nullptr;
        void attach(ga::TrainerBase& its) { trainer = &its; }
        void after_step(const ga::Step& step) {
          if (step.update == most) trainer->stop();
        }
      };
      return rates_of(batches, options, total, ga::Accumulate{.steps = 8}, Stop{most},
                      ga::SaveState{.directory = directory / "states"});
    };
    return by_texts ? policies(texts()) : policies(rows());
  };
  const auto straight = by_texts ? rates_of(texts(), {.epochs = 3, .tail = tail}, {}, ga::Accumulate{.steps = 8})
                                 : rates_of(rows(), {.epochs = 3, .tail = tail}, {}, ga::Accumulate{.steps = 8});
  auto rates = fit({.epochs = 3}, {}, stop).rates;
  CHECK(rates.size() == static_cast<std::size_t>(stop));
  SECTION("the same epochs") {
    for (auto rate : fit({.epochs = 3, .resume = directory / "states"}).rates) rates.push_back(rate);
    CHECK(rates == straight.rates);
  }
  SECTION("other epochs") {
    const auto more = fit({.epochs = 5, .resume = directory / "states"});
    CHECK(more.rates.back() == 1.0 / static_cast<double>(more.updates - 2));
  }
  SECTION("a total that was given") {
    if (stop > 1) return;
    fit({.epochs = 3, .resume = directory / "states"}, 40, 3);
    REQUIRE_ERROR("Schedule: .total must be given to resume in the middle of an epoch",
                  fit({.epochs = 4, .resume = directory / "states"}));
  }
  SECTION("a total that is given") { CHECK(fit({.epochs = 3, .resume = directory / "states"}, 40).rates.back() > 0.3); }
}

TEST_CASE("Schedule: a missing total is the same on all ranks") {
  std::vector<Rates> ranks(3);  // with 13, 13 and 12 batches
  tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
    ranks[static_cast<std::size_t>(group.rank())] = rates_of(rows(group), {.epochs = 2}, {}, ga::Accumulate{.steps = 4},
                                                             ga::DataParallel{.group = group, .check_every = 1});
  });
  const auto alone = rates_of(rows(), {.epochs = 2}, {}, ga::Accumulate{.steps = 12});
  CHECK(alone.updates == 8);
  for (auto& rank : ranks) CHECK(rank.rates == alone.rates);
}

TEST_CASE("Schedule: a missing total counts the rest of an epoch in the current windows and ranks") {
  struct Run {
    int ranks;
    std::int64_t steps;
  };
  const auto [before, after] = GENERATE(table<Run, Run>({{{1, 1}, {2, 1}},
                                                         {{2, 1}, {1, 1}},
                                                         {{2, 1}, {3, 1}},
                                                         {{1, 4}, {1, 8}},
                                                         {{2, 1}, {2, 1}},
                                                         {{1, 8}, {1, 4}},
                                                         {{2, 2}, {1, 3}}}));
  CAPTURE(before.ranks, before.steps, after.ranks, after.steps);
  const std::int64_t stop = GENERATE(2, 4);
  const Directory directory;
  const auto fit = [&](const Run& run, const ga::FitOptions& options) {
    std::vector<Rates> ranks(static_cast<std::size_t>(run.ranks));
    tests::as_ranks(run.ranks, [&](const ga::ProcessGroup& group) {
      ranks[static_cast<std::size_t>(group.rank())] = rates_of(
          rows(group), options, {}, ga::Accumulate{.steps = run.steps},
          ga::DataParallel{.group = group, .check_every = 1}, ga::SaveState{.directory = directory / "states"});
    });
    return ranks;
  };
  fit(before, {.epochs = 1, .updates = stop});
  for (auto& rank : fit(after, {.epochs = 1, .resume = directory / "states", .allow_changes = true})) {
    CHECK(rank.rates.size() == static_cast<std::size_t>(rank.updates - stop));
    const auto last = rank.rates.back();  // decayed to 0, within one update if the position is inside a window
    if (stop * before.ranks * before.steps % (after.ranks * after.steps) == 0)
      CHECK(last == 1.0 / static_cast<double>(rank.updates - 2));
    CHECK(last <= 2.0 / static_cast<double>(rank.updates - 1));
    CHECK(std::ranges::count(rank.rates, 0.0) <= 1);
  }
}

TEST_CASE("Schedule: with allow_changes, the first update has the new rate") {
  const Directory directory;
  const auto first_rate = [&](double peak, const ga::FitOptions& options) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 1);
    std::vector<double> rates;
    ga::Trainer trainer(
        model, sgd,
        [](auto& net, auto&) {
          return net->forward(torch::ones({2, 4}, at::kDouble)).mean() * 0.01;
        },
        ga::Schedule{ga::lr::Constant{.peak = peak}}, [&](const ga::Step& step) { rates.push_back(step.lr); },
        ga::SaveState{.directory = directory / "states"});
    trainer.fit(rows(), options);
    return rates.at(0);
  };
  CHECK(first_rate(0.5, {.updates = 2}) == 0.5);
  CHECK(first_rate(0.25, {.updates = 4, .resume = directory / "states", .allow_changes = true}) == 0.25);
}

TEST_CASE("Schedule: a parameter group that was added during training keeps its ratio in a resumed fit") {
  struct AddsGroup {
    torch::optim::SGD& sgd;
    at::Tensor parameter;
    void on_epoch_begin(std::int64_t epoch) const {
      if (epoch < 1 || sgd.param_groups().size() > 1) return;
      sgd.add_param_group({{parameter}, std::make_unique<torch::optim::SGDOptions>(0.2)});
    }
  };
  const Directory directory;
  const auto rates_after = [&](std::int64_t updates, const char* resume, bool before_fit) {
    torch::nn::Linear model(4, 1);
    torch::optim::SGD sgd(std::vector<at::Tensor>{model->weight}, 1);
    const AddsGroup adds{sgd, model->bias};
    ga::Trainer trainer(
        model, sgd, [](auto& net, auto& batch) { return net->forward(batch.data).mean(); }, adds,
        ga::Schedule{[](std::int64_t update) { return 1.0 / static_cast<double>(1 + update); }},
        ga::SaveState{.directory = directory / "states"});
    if (before_fit) adds.on_epoch_begin(1);
    trainer.fit(rows(), {.updates = updates, .resume = resume});
    std::vector<double> rates;
    for (auto& group : sgd.param_groups()) rates.push_back(group.options().get_lr());
    return rates;
  };
  for (const bool before_fit : {false, true}) {
    const auto wanted = rates_after(42, "", false);
    CHECK(wanted[1] == Approx(0.2 * wanted[0]));
    std::filesystem::remove_all(directory / "states");
    rates_after(40, "", false);  // the second epoch begins after update 38
    CHECK(rates_after(42, (directory / "states").c_str(), before_fit) == wanted);
    std::filesystem::remove_all(directory / "states");
  }
}

TEST_CASE("Schedule: a state of another kind of schedule loads") {
  const Directory directory;
  const auto rate_after = [&](std::int64_t updates, auto schedule, auto& optimizer, torch::nn::Linear& model) {
    ga::Trainer trainer(
        model, optimizer, [](auto& net, auto& batch) { return net->forward(batch.data).mean(); }, std::move(schedule),
        ga::SaveState{.directory = directory / "states"});
    trainer.fit(rows(), {.updates = updates, .resume = directory / "states"});
    return optimizer.param_groups()[0].options().get_lr();
  };
  for (const bool first_by_name : {false, true}) {
    std::filesystem::remove_all(directory / "states");
    const auto run = [&](bool by_name, std::int64_t updates) {
      torch::nn::Linear model(4, 1);
      torch::optim::SGD sgd(model->parameters(), 1);
      ga::optim::MultiOptimizer optimizer(sgd);
      const ga::lr::Constant rate{.peak = by_name ? 0.5 : 0.25};
      if (by_name) return rate_after(updates, ga::Schedule{ga::lr::ByName{{"SGD", rate}}}, optimizer, model);
      return rate_after(updates, ga::Schedule{rate}, optimizer, model);
    };
    run(first_by_name, 3);
    CHECK(run(!first_by_name, 5) == (first_by_name ? 0.25 : 0.5));
  }
}
