// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/trainer.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Data {
  at::Tensor inputs = torch::randn({37, 4}, at::kDouble), targets = torch::randn({37, 3}, at::kDouble);
};

auto objective = [](auto& model, auto& batch) {
  return ga::Loss{torch::mse_loss(model->forward(batch.data), batch.target), batch.data.size(0)};
};

struct Outcome {
  torch::nn::Sequential model = make_model();
  std::vector<double> losses, items;
  std::vector<std::int64_t> micro_batches, samples;
  ga::FitReport report;
  ga::Shard shard = ga::Shard::none;
};

/// Trains as one process, or as a rank of several.
void train(Outcome& outcome, const Data& data, const ga::ProcessGroup& group, ga::FitOptions options,
           std::int64_t steps) {
  ga::data::TensorBatches batches(
      data.inputs, data.targets,
      {.batch_size = 3, .shuffle = true, .seed = 3, .rank = group.rank(), .world_size = group.world_size()});
  torch::optim::Adam adam(outcome.model->parameters(), torch::optim::AdamOptions(0.05));
  ga::Trainer trainer(outcome.model, adam, objective, ga::Accumulate{.steps = steps}, ga::ClipNorm{.max = 0.5},
                      ga::DataParallel{.group = group,
                                       .shard = outcome.shard,
                                       .options = {.bucket_bytes = 100, .seed_by_rank = false},
                                       .check_every = 2},
                      [&](const ga::Step& step) {
                        outcome.losses.push_back(step.loss.item<double>());
                        outcome.items.push_back(step.items);
                        outcome.micro_batches.push_back(step.micro_batches);
                        outcome.samples.push_back(step.samples);
                      });
  outcome.report = trainer.fit(batches, options);
}

}  // namespace

TEST_CASE("DataParallel: ranks train like one process with the same report") {
  const int world_size = GENERATE(2, 4);
  const std::int64_t steps = GENERATE(1, 3);
  const auto tail = GENERATE(ga::Tail::flush, ga::Tail::carry);
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer, ga::Shard::gradients);
  if (shard == ga::Shard::gradients && tail == ga::Tail::carry) return;  // not allowed together
  const Data data;
  const ga::FitOptions options{.epochs = 3, .tail = tail};
  Outcome one;
  train(one, data, ga::ProcessGroup(), options, steps * world_size);

  std::vector<Outcome> ranks(static_cast<std::size_t>(world_size));
  for (auto& rank : ranks) rank.model = make_model(), rank.shard = shard;
  {
    const torch::NoGradGuard no_grad;
    ranks[1].model->parameters()[0].zero_();  // replaced by rank 0's
  }
  tests::as_ranks(world_size, [&](const ga::ProcessGroup& group) {
    train(ranks[static_cast<std::size_t>(group.rank())], data, group, options, steps);
  });
  for (auto& rank : ranks) {
    CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
    CHECK(rank.report.updates == ranks[0].report.updates);
    if (tail == ga::Tail::carry) continue;  // windows then end at other batches
    CHECK(rank.report.samples == 3 * 37);
    CHECK(distance(rank.model, one.model) < 1e-11);
    CHECK(rank.report.updates == one.report.updates);
    CHECK(rank.items == one.items);
    CHECK(rank.samples == one.samples);
    CHECK(rank.micro_batches == one.micro_batches);
    REQUIRE(rank.losses.size() == one.losses.size());
    for (std::size_t i = 0; i < one.losses.size(); ++i) CHECK(rank.losses[i] == Approx(one.losses[i]).epsilon(1e-11));
  }
}

namespace {

/// A model with buffers, which differ between ranks within an epoch.
torch::nn::Sequential make_normed_model() {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 3));
  model->to(at::kDouble);
  return model;
}

struct Run {
  torch::nn::Sequential model = make_normed_model();
  ga::FitReport report;
  std::vector<double> losses;

  void fit(const Data& data, const ga::ProcessGroup& group, const std::filesystem::path& directory,
           ga::FitOptions options, ga::Shard shard = ga::Shard::none) {
    ga::data::TensorBatches batches(
        data.inputs, data.targets,
        {.batch_size = 5, .shuffle = true, .seed = 3, .rank = group.rank(), .world_size = group.world_size()});
    torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.05));
    ga::Trainer trainer(model, adam, objective, ga::Accumulate{.steps = 2}, ga::Ema{.decay = 0.9},
                        ga::SaveState{.directory = directory, .every_updates = 2, .keep_last = 0},
                        ga::DataParallel{.group = group, .shard = shard, .check_every = 1},
                        [&](const ga::Step& step) { losses.push_back(step.loss.item<double>()); });
    report = trainer.fit(batches, options);
  }
};

}  // namespace

TEST_CASE("DataParallel: a saved training resumes bitwise on all ranks") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer, ga::Shard::gradients);
  const Data data;
  const Directory directory;
  std::vector<Run> straight(2), first(2), second(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    straight[static_cast<std::size_t>(group.rank())].fit(data, group, directory / "straight", {.epochs = 3}, shard);
  });
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    first[static_cast<std::size_t>(group.rank())].fit(data, group, directory / "stopped", {.updates = 3}, shard);
  });
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    second[static_cast<std::size_t>(group.rank())].fit(data, group, directory / "stopped",
                                                       {.epochs = 3, .resume = directory / "stopped"}, shard);
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(second[rank].report.resumed_from == (directory / "stopped" / "step-000003").string());
    CHECK(second[rank].report.updates == straight[rank].report.updates);
    CHECK(second[rank].report.samples == straight[rank].report.samples);
    CHECK(torch::equal(flat(second[rank].model), flat(straight[rank].model)));
    for (std::size_t i = 0; i < straight[rank].model->buffers().size(); ++i)
      CHECK(torch::equal(second[rank].model->buffers()[i], straight[rank].model->buffers()[i]));
    CHECK(std::equal(second[rank].losses.rbegin(), second[rank].losses.rend(), straight[rank].losses.rbegin()));
    CHECK_FALSE(torch::equal(flat(first[rank].model), flat(straight[rank].model)));
  }
  // Ranks that pass no directory get an error, on all ranks.
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    ga::FitOptions options{.epochs = 3};
    if (group.rank() == 0) options.resume = directory / "stopped";
    Run some;
    errors[static_cast<std::size_t>(group.rank())] =
        testing::error_of([&] { some.fit(data, group, directory / "stopped", options, shard); });
  });
  for (auto& error : errors) CHECK(error.find("`resume` must be given on all ranks") != error.npos);
  // Another number of ranks cannot resume it.
  Run alone;
  REQUIRE_ERROR("world_size = 2, but here it is 1", alone.fit(data, ga::ProcessGroup(), directory / "stopped",
                                                              {.epochs = 3, .resume = directory / "stopped"}));
}

TEST_CASE("DataParallel: an error of one rank's background write is thrown on all ranks") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer);
  const Data data;
  const Directory directory;
  const FailingFiles files(0, FailingFiles::How::fail_forever, ENOSPC, "/rank_1.");
  std::vector<Run> runs(2);
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    errors[rank] = error_of([&] { runs[rank].fit(data, group, directory / "states", {.epochs = 3}, shard); });
  });
  CAPTURE(errors[0], errors[1]);
  // Either rank may be the first to notice; the other one may throw that it has given up, and only warn of its own
  // state.
  const auto gave_up = [](const std::string& error) { return contains(error, "has given up"); };
  const auto names_the_file = [](const std::string& error) {
    return contains(error, "/rank_1.") && contains(error, "No space left on device");
  };
  CHECK((names_the_file(errors[1]) || gave_up(errors[1])));
  CHECK((names_the_file(errors[0]) || gave_up(errors[0]) || contains(errors[0], "rank 1 must write its part of")));
  CHECK_FALSE((gave_up(errors[0]) && gave_up(errors[1])));
  CHECK(ga::detail::names_in(directory / "states").empty());
}

namespace {

/// The rows of the training, over all ranks, and the results that all ranks share.
struct Share {
  torch::nn::Sequential model = make_model();
  std::vector<std::int64_t> rows;
  ga::FitReport report;
};

template <class Batches, class... Policies>
void fit_share(Share& own, Batches& batches, const ga::ProcessGroup& group, const std::filesystem::path& directory,
               ga::FitOptions options, Policies... policies) {
  torch::optim::SGD sgd(own.model->parameters(), 0.05);
  const auto noted = [&own](auto& net, auto& batch) {
    for (std::int64_t i = 0; i < batch.data.size(0); ++i)
      own.rows.push_back(batch.data[i].flatten()[0].template item<std::int64_t>());
    auto scores = net->forward(batch.data.flatten(1).narrow(1, 0, 4).to(at::kDouble) / 30);
    return ga::Loss{torch::mse_loss(scores, batch.target), batch.data.size(0)};
  };
  options.resume = directory;
  ga::Trainer trainer(own.model, sgd, noted, ga::SaveState{.directory = directory},
                      ga::DataParallel{.group = group, .options = {.seed_by_rank = false}}, policies...);
  own.report = trainer.fit(batches, options);
}

/// Trains ranks that take turns with the batches of 38 rows or sequences, each of which begins with its number.
std::vector<Share> fit_by(int ranks, const std::string& data, const std::filesystem::path& directory,
                          ga::FitOptions options, std::int64_t steps) {
  std::vector<Share> shares(static_cast<std::size_t>(ranks));
  options.allow_changes = true;
  const auto targets = torch::arange(114, at::kDouble).view({38, 3}) / 50;
  tests::as_ranks(ranks, [&](const ga::ProcessGroup& group) {
    auto& own = shares[static_cast<std::size_t>(group.rank())];
    const std::int64_t rank = group.rank(), world_size = group.world_size();
    const auto fit = [&](auto batches) {
      fit_share(own, batches, group, directory, options, ga::Accumulate{.steps = steps});
    };
    if (data == "tensors")
      return fit(ga::data::TensorBatches(
          torch::arange(38).unsqueeze(1).expand({38, 4}).contiguous(), targets,
          {.batch_size = 2, .shuffle = true, .seed = 3, .rank = rank, .world_size = world_size}));
    std::vector<at::Tensor> texts;
    for (std::int64_t i = 0; i < 38; ++i) texts.push_back(torch::full({4 + i % 5}, i, at::kLong));
    fit(ga::data::LengthBuckets(texts, targets,
                                {.tokens = 17, .shuffle = true, .rank = rank, .world_size = world_size}));
  });
  return shares;
}

std::vector<std::int64_t> rows_of(const std::vector<Share>& shares, std::vector<std::int64_t> rows = {}) {
  for (auto& share : shares) rows.insert(rows.end(), share.rows.begin(), share.rows.end());
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace

TEST_CASE("DataParallel: another number of ranks resumes at the common position and ends like one process") {
  const int before = GENERATE(1, 2, 3), after = GENERATE(1, 2, 3);
  const std::int64_t stop = GENERATE(2, 4, 5, 7);  // windows of 6 batches: within an epoch, at its end, in the next
  const std::string data = stop == 2 || stop == 7 ? "tensors" : "lengths";
  const Directory directory;
  const auto straight = fit_by(1, data, directory / "straight", {.epochs = 3}, 6);
  const auto first = fit_by(before, data, directory / "stopped", {.updates = stop}, 6 / before);
  const auto second = fit_by(after, data, directory / "stopped", {.epochs = 3}, 6 / after);
  CAPTURE(data, before, after, stop);
  CHECK(rows_of(second, rows_of(first)) == rows_of(straight));
  for (auto& share : second) {
    CHECK(share.report.updates == straight[0].report.updates);
    CHECK(share.report.samples == 3 * 38);
    CHECK(distance(share.model, straight[0].model) < 1e-11);
  }
}

TEST_CASE("DataParallel: no row is dropped or repeated when old and new numbers of ranks do not divide each other") {
  const int first = GENERATE(1, 2, 3), second = GENERATE(1, 2, 3), third = GENERATE(1, 2, 3);
  if (first == second || second == third) return;
  const std::int64_t stop = GENERATE(2, 7, 10);  // windows with one batch per rank
  const std::string data = stop == 7 ? "lengths" : "tensors";
  const Directory directory;
  std::vector<std::int64_t> all;
  for (int epoch = 0; epoch < 2; ++epoch)
    for (std::int64_t row = 0; row < 38; ++row) all.push_back(row);
  std::sort(all.begin(), all.end());
  auto rows = rows_of(fit_by(first, data, directory / "states", {.updates = stop}, 1));
  rows = rows_of(fit_by(second, data, directory / "states", {.updates = stop + 2}, 1), rows);
  rows = rows_of(fit_by(third, data, directory / "states", {.epochs = 2}, 1), rows);
  CAPTURE(data, first, second, third, stop);
  CHECK(rows == all);
}

TEST_CASE("DataParallel: a rank that is new after a resume keeps its own random numbers") {
  const Directory directory;
  fit_by(2, "tensors", directory / "states", {.updates = 2}, 1);
  std::vector<int> random(3);
  tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::GradAccumulator accumulator(sgd, {.steps = 1});
    const ga::Replicas replicas(group, model, accumulator, {.seed_by_rank = false});
    const auto folder = ga::detail::newest_state(directory / "states").value();
    random[static_cast<std::size_t>(group.rank())] =
        ga::detail::open_state(folder, /*allow_changes=*/true, replicas.peers().get()).has("random");
  });
  CHECK(random == std::vector{1, 1, 0});
}

TEST_CASE("DataParallel: another number of ranks is refused if the common position is not one in the data order") {
  const Directory directory;
  const auto inputs = torch::arange(24).unsqueeze(1).expand({24, 4}).contiguous();
  const auto targets = torch::zeros({24, 3}, at::kDouble);
  std::vector<std::string> errors(3);
  std::vector<Share> shares(3);
  const auto error_of_fit = [&](const ga::ProcessGroup& group, auto batches, ga::FitOptions options, auto... policies) {
    const auto number = static_cast<std::size_t>(group.rank());
    options.allow_changes = options.epochs.has_value();
    errors[number] = testing::error_of(
        [&] { fit_share(shares[number], batches, group, directory / "states", options, policies...); });
  };
  const auto dealt = [&](const ga::ProcessGroup& group, std::int64_t batch_size) {
    return ga::data::TensorBatches(inputs, targets,
                                   {.batch_size = batch_size, .rank = group.rank(), .world_size = group.world_size()});
  };
  struct Uneven {
    std::int64_t micro_batches, taken = 0;
    bool ready() { return ++taken % micro_batches == 0; }
  };
  SECTION("each rank has taken another number of batches") {
    tests::as_ranks(2, [&](auto& group) {
      error_of_fit(group, dealt(group, 2), {.updates = 2}, Uneven{.micro_batches = group.rank() + 1});
    });
    CHECK(errors[0] + errors[1] == "");
    tests::as_ranks(3, [&](auto& group) { error_of_fit(group, dealt(group, 2), {.epochs = 1}); });
    for (auto& error : errors)
      CHECK_THAT(error,
                 Catch::Contains(
                     "TensorBatches: the state was saved in the middle of epoch 0 by 2 rank(s), after 2, 4 batches"));
    tests::as_ranks(2, [&](auto& group) {  // the same number of ranks resumes also from uneven positions
      error_of_fit(group, dealt(group, 2), {.updates = 3}, Uneven{.micro_batches = group.rank() + 1});
    });
    CHECK(errors[0] + errors[1] == "");
    CHECK(rows_of({shares[1]}).size() == 12);
  }
  SECTION("other batches") {
    tests::as_ranks(2, [&](auto& group) { error_of_fit(group, dealt(group, 2), {.updates = 2}); });
    error_of_fit({}, dealt({}, 3), {.epochs = 1});
    CHECK_THAT(errors[0], Catch::Contains("in the middle of epoch 0 by 2 rank(s), after 2, 2 batches"));
    CHECK_THAT(errors[0], Catch::Contains("the same data"));
  }
  SECTION("a range that does not tell its place") {
    std::vector<ga::data::Batch> list;
    for (std::int64_t i = 0; i < 4; ++i) list.push_back({inputs.narrow(0, i, 2), targets.narrow(0, i, 2)});
    tests::as_ranks(2, [&](auto& group) { error_of_fit(group, list, {.updates = 2}); });
    error_of_fit({}, list, {.epochs = 1});
    CHECK_THAT(errors[0], Catch::Contains("Trainer: the state was saved in the middle of an epoch, by 2 rank(s)"));
  }
  SECTION("an open window") {
    Share own;
    torch::optim::SGD sgd(own.model->parameters(), 0.05);
    const auto batch = *dealt({}, 2).begin();
    const auto loss = [&](auto& net, auto&) { return net->forward(torch::ones({2, 4}, at::kDouble)).sum(); };
    {
      ga::Trainer trainer(own.model, sgd, loss, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = {}});
      trainer.step(batch);
      ga::save(directory / "open", trainer);
    }
    tests::as_ranks(2, [&](auto& group) {
      Share other;
      torch::optim::SGD descent(other.model->parameters(), 0.05);
      ga::Trainer trainer(other.model, descent, loss, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group});
      errors[static_cast<std::size_t>(group.rank())] =
          testing::error_of([&] { ga::load(directory / "open", trainer, {.allow_changes = true}); });
    });
    for (int rank : {0, 1})
      CHECK_THAT(errors[static_cast<std::size_t>(rank)],
                 Catch::Contains("saved by 1 rank(s) in the middle of a window, after 1 micro-batch"));
  }
}

TEST_CASE("DataParallel: options that sharded gradients exclude are refused before training") {
  const Data data;
  std::vector<std::string> of_tail(2), of_memory(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto place = static_cast<std::size_t>(group.rank());
    const auto error_of_fit = [&](ga::FitOptions options, auto... policies) {
      auto model = make_model();
      torch::optim::SGD sgd(model->parameters(), 0.05);
      ga::data::TensorBatches batches(data.inputs, data.targets,
                                      {.batch_size = 5, .rank = group.rank(), .world_size = group.world_size()});
      return testing::error_of([&] {
        ga::Trainer trainer(model, sgd, objective, ga::DataParallel{.group = group, .shard = ga::Shard::gradients},
                            policies...);
        trainer.fit(batches, options);
      });
    };
    of_tail[place] = error_of_fit({.epochs = 1, .tail = ga::Tail::drop});
    of_memory[place] = error_of_fit({.epochs = 1}, ga::FitMemory{.budget = 1 << 30});
  });
  for (auto& error : of_tail) CHECK_THAT(error, Catch::Contains("tail must be ga::Tail::flush"));
  for (auto& error : of_memory)
    CHECK_THAT(error, Catch::Contains("FitMemory: must not be combined with Shard::gradients"));
}

namespace {

/// A policy: calls functions at an update and at the end of an epoch, and records results.
struct Watch {
  std::function<void(const ga::Step&)> at_window = {};
  std::function<void(std::int64_t)> at_epoch_end = {};
  std::vector<double>* norms = nullptr;

  void after_backward(ga::Gradients& so_far) const { norms->push_back(so_far.norm().item<double>()); }
  void after_window(const ga::Step& step) const { at_window(step); }
  void on_epoch_end(std::int64_t epoch) const { at_epoch_end(epoch); }
};

/// Ranks with separate numbers of batches, until a policy ends the fit.
struct Ended {
  torch::nn::Sequential model = make_model();
  std::vector<double> items, norms;
  std::vector<std::int64_t> epochs;
  ga::FitReport report;
};

template <class End>
void train_until(Ended& own, const ga::ProcessGroup& group, std::int64_t rows, std::int64_t epochs, const End& end,
                 const std::filesystem::path& directory) {
  torch::manual_seed(3);
  ga::data::TensorBatches batches(torch::ones({rows, 4}, at::kDouble) * (group.rank() + 1),
                                  torch::ones({rows, 3}, at::kDouble), {.batch_size = 2});
  torch::optim::SGD sgd(own.model->parameters(), 0.1);
  std::function<void()> stop, interrupt;
  ga::Trainer trainer(own.model, sgd, objective, ga::SaveState{.directory = directory, .every_updates = 1000},
                      Watch{.at_window =
                                [&](const ga::Step& step) {
                                  own.items.push_back(step.items);
                                  own.epochs.push_back(step.epoch);
                                  end(group.rank(), "window", step.update, stop, interrupt);
                                },
                            .at_epoch_end = [&](auto epoch) { end(group.rank(), "epoch", epoch, stop, interrupt); },
                            .norms = &own.norms},
                      ga::DataParallel{.group = group, .options = {.bucket_bytes = 8, .seed_by_rank = false}});
  stop = [&trainer] { trainer.stop(); };
  interrupt = [&trainer] { trainer.interrupt(SIGTERM); };
  own.report = trainer.fit(batches, {.epochs = epochs});
}

}  // namespace

TEST_CASE("DataParallel: a signal while one rank has no batches left ends both and saves a state") {
  const int signalled = GENERATE(0, 1);
  const Directory directory;
  std::vector<Ended> ranks(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    train_until(
        ranks[static_cast<std::size_t>(group.rank())], group, group.rank() == 0 ? 20 : 4, 3,
        [&](int rank, const std::string& when, std::int64_t number, auto&, auto& interrupt) {
          if (rank == signalled && when == "window" && number == 5) interrupt();
        },
        directory / "states");
  });
  for (auto& rank : ranks) {
    CHECK(rank.report.signal == SIGTERM);
    CHECK(rank.report.updates == 6);
    CHECK(rank.items == std::vector<double>{4, 4, 2, 2, 2, 2});
    CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
  }
  CHECK(std::filesystem::exists(directory / "states" / "step-000006"));
}

TEST_CASE("DataParallel: time-based saves follow one rank's clock at the same updates on all ranks") {
  const Data data;
  const Directory directory;
  const int timed = GENERATE(0, 1);
  std::vector<Outcome> ranks(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    auto& own = ranks[static_cast<std::size_t>(group.rank())];
    ga::data::TensorBatches batches(data.inputs, data.targets,
                                    {.batch_size = 3, .rank = group.rank(), .world_size = group.world_size()});
    torch::optim::SGD sgd(own.model->parameters(), 0.1);
    ga::Trainer trainer(
        own.model, sgd, objective, ga::DataParallel{.group = group},
        ga::SaveState{
            .directory = directory / "states", .every_minutes = group.rank() == timed ? 1e-300 : 1e9, .keep_last = 0});
    own.report = trainer.fit(batches, {.updates = 6});
  });
  std::vector<std::int64_t> saved;
  for (auto& state : ga::detail::StateDirectory(directory / "states").finished()) saved.push_back(state.step);
  CHECK(saved == std::vector<std::int64_t>{2, 4, 6});  // the other rank learns it in the next window
  for (auto& rank : ranks) CHECK(rank.report.updates == 6);
}

TEST_CASE("DataParallel: a directory that rank 0 cannot write ends all ranks before the first update") {
  const Data data;
  std::vector<std::string> errors(2);
  std::vector<int> micro_batches(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    auto model = make_model();
    ga::data::TensorBatches batches(data.inputs, data.targets,
                                    {.batch_size = 3, .rank = group.rank(), .world_size = group.world_size()});
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(
        model, sgd,
        [&](auto& net, auto& batch) {
          ++micro_batches[rank];
          return objective(net, batch);
        },
        ga::DataParallel{.group = group}, ga::SaveState{.directory = "/proc"});
    errors[rank] = testing::error_of([&] { trainer.fit(batches, {.updates = 6}); });
  });
  CHECK(contains(errors[0], "/proc: must be a directory that can be written to"));
  CHECK(contains(errors[1], "rank 0: /proc: must be a directory that can be written to"));
  CHECK(micro_batches == std::vector<int>{0, 0});
}

TEST_CASE("DataParallel: stop at the end of an epoch ends the fit there also on a rank without batches") {
  const Directory directory;
  std::vector<Ended> ranks(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    train_until(
        ranks[static_cast<std::size_t>(group.rank())], group, group.rank() == 0 ? 4 : 2, 5,
        [&](int rank, const std::string& when, std::int64_t number, auto& stop, auto&) {
          if (rank == 1 && when == "epoch" && number == 1) stop();
        },
        directory / "states");
  });
  for (auto& rank : ranks) {
    CHECK(rank.report.epochs == 2);
    CHECK(rank.report.updates == 4);
    CHECK(rank.epochs == std::vector<std::int64_t>{0, 0, 1, 1});
  }
  // after_backward of a window's last micro-batch has the sum over all ranks, or this rank's if the other has none.
  REQUIRE(ranks[0].norms.size() == 4);
  REQUIRE(ranks[1].norms.size() == 2);
  CHECK(ranks[0].norms[0] == ranks[1].norms[0]);
  CHECK(ranks[0].norms[2] == ranks[1].norms[1]);
}

TEST_CASE("DataParallel: an exception in fit on one rank ends the others immediately") {
  const Directory directory;
  std::vector<Ended> ranks(2);
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    try {
      train_until(
          ranks[number], group, 8, 1,
          [&](int rank, const std::string& when, std::int64_t update, auto&, auto&) {
            if (rank == 1 && when == "window" && update == 2) throw std::runtime_error("out of paper");
          },
          directory / "states");
    } catch (const std::exception& error) {
      errors[number] = error.what();
    }
  });
  CHECK(contains(errors[0], "rank 1 has given up: out of paper"));
  CHECK(errors[1] == "out of paper");
}

TEST_CASE("DataParallel: a state that one rank cannot read is loaded by no rank") {
  const Data data;
  const Directory directory;
  std::vector<Run> runs(2), again(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    runs[static_cast<std::size_t>(group.rank())].fit(data, group, directory / "run", {.updates = 3});
  });
  const auto file = directory / "run" / "step-000003" / "model.safetensors";
  auto text = text_of(file);
  text.back() = static_cast<char>(text.back() ^ 1);
  write_text(file, text);
  std::vector<std::string> errors(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    try {
      again[number].fit(data, group, directory / "run", {.epochs = 3, .resume = directory / "run"});
    } catch (const std::exception& error) {
      errors[number] = error.what();
    }
  });
  for (auto& error : errors) CHECK(contains(error, "model.safetensors"));
  for (auto& error : errors) CHECK(contains(error, "step-000002"));  // the newest intact one
}

TEST_CASE("DataParallel: stop on one rank ends all ranks after the same window") {
  const Data data;
  std::vector<Outcome> ranks(3);
  for (auto& rank : ranks) rank.model = make_model();
  tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
    auto& own = ranks[static_cast<std::size_t>(group.rank())];
    ga::data::TensorBatches batches(data.inputs, data.targets,
                                    {.batch_size = 3, .rank = group.rank(), .world_size = group.world_size()});
    torch::optim::SGD sgd(own.model->parameters(), 0.1);
    std::function<void()> stop;
    ga::Trainer trainer(own.model, sgd, objective, ga::DataParallel{.group = group, .options = {.seed_by_rank = false}},
                        [&](const ga::Step& step) {
                          own.items.push_back(step.items);
                          if (group.rank() == 1 && step.update == 2) stop();
                        });
    stop = [&trainer] { trainer.stop(); };
    own.report = trainer.fit(batches, {.epochs = 5});
  });
  for (auto& rank : ranks) {
    CHECK(rank.report.updates == 3);  // the others learn it in the next window
    CHECK(rank.items == ranks[0].items);
    CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
  }
}
