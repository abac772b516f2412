// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/checkpoint.hpp>
#include <gradaccum/flop_counter.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/trainer.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cstdio>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

// Items and FLOP that a fit counts. The oracle is a FlopCounter around each micro-batch of a plain loop.

namespace ga = gradaccum;
using namespace testing;
using namespace std::chrono_literals;

namespace {

const auto objective = [](auto& model, auto& batch) { return loss_of(model, batch); };
const auto of_words = [](auto& model, auto& batch) {  // each row counts as 7 words
  return ga::Loss{loss_of(model, batch), 7 * batch.data.size(0)};
};

double flops_of_loop(const std::vector<Example>& batches) {
  auto model = make_model();
  const ga::FlopCounter counter;
  for (auto& batch : batches) loss_of(model, batch).backward();
  return static_cast<double>(counter.get_total_flops());
}

template <class Objective, class... Policies>
ga::FitReport fit(const std::vector<Example>& batches, const ga::FitOptions& options, const Objective& of,
                  const Policies&... policies) {
  auto model = make_model();
  ga::optim::SGD sgd(model->parameters(), 0.01);
  return ga::Trainer(model, sgd, of, policies...).fit(batches, options);
}

/// A batch whose tensors the library cannot list.
struct Opaque {
  Example rows;
  std::string note;
};

}  // namespace

TEST_CASE("FitOptions: count_flops counts all micro-batches, of all layouts and epochs") {
  const auto batches = make_batches({5, 5, 3, 5, 3, 8});
  const auto report =
      fit(batches, {.epochs = 3, .unit = "words", .count_flops = true}, of_words, ga::Accumulate{.steps = 2});
  CHECK(report.flops == 3 * flops_of_loop(batches));
  CHECK(report.flops == 3 * 29 * 272);  // 2 for each of 8 x 4 weights in 2 products, and of 3 x 8 in 3
  CHECK(report.items == 3 * 29 * 7);
  CHECK(report.unit == "words");
  CHECK(report.peak_flops == 0);
  CHECK(fit(batches, {.peak_flops = 1e9}, objective).flops == flops_of_loop(batches));
  CHECK(fit(batches, {}, objective).flops == 0);
}

TEST_CASE("FitOptions: count_flops watches the first micro-batch of each layout") {
  std::vector<bool> watched;
  const auto see = [&](auto& model, auto& batch) {
    watched.push_back(at::hasCallbacks());
    return torch::mse_loss(model->forward(batch.data), batch.target.to(at::kDouble));
  };
  fit(make_batches({5, 5, 3, 5, 3, 8}), {.count_flops = true}, see);
  CHECK(watched == std::vector<bool>{true, false, true, false, false, true});

  SECTION("by dtype, too") {
    watched.clear();
    auto batches = make_batches({5, 5});
    batches[1].target = batches[1].target.to(at::kFloat);
    fit(batches, {.count_flops = true}, see);
    CHECK(watched == std::vector<bool>{true, true});
  }
  SECTION("each one of an unknown layout") {
    watched.clear();
    std::vector<Opaque> batches;
    for (auto& rows : make_batches({5, 5, 3})) batches.push_back({rows, "a note"});
    auto model = make_model();
    ga::optim::SGD sgd(model->parameters(), 0.01);
    ga::Trainer trainer(model, sgd, [&](auto& net, auto& batch) { return see(net, batch.rows); });
    CHECK(trainer.fit(batches, {.count_flops = true}).flops == 13 * 272);
    CHECK(watched == std::vector<bool>{true, true, true});
  }
  SECTION("again in the next fit, of a model that may have changed") {
    watched.clear();
    auto model = make_model();
    ga::optim::SGD sgd(model->parameters(), 0.01);
    ga::Trainer trainer(model, sgd, see);
    const auto batches = make_batches({5, 5});
    CHECK(trainer.fit(batches, {.count_flops = true}).flops == 10 * 272);
    model[0]->as<torch::nn::Linear>()->weight.requires_grad_(false);
    CHECK(trainer.fit(batches, {.count_flops = true}).flops == 10 * 208);
    CHECK(watched == std::vector<bool>{true, false, true, false});
  }
}

TEST_CASE("FitOptions: count_flops, of a layout whose first batch is left out for its loss") {
  auto batches = make_batches({5, 5, 5});
  batches[0].target.fill_(std::numeric_limits<double>::quiet_NaN());
  const auto report = fit(batches, {.on_nan = ga::OnNan::skip, .count_flops = true}, objective);
  CHECK(report.nan_batches == 1);
  CHECK(report.flops >= 2 * 5 * 272);  // and the forward pass of the first
  CHECK(report.flops < 3 * 5 * 272);
}

TEST_CASE("FitOptions: count_flops, without what a checkpoint runs again") {
  const auto batches = make_batches({5, 5});
  const auto checkpointed = [](auto& model, auto& batch) {
    const auto output = ga::checkpoint([&](const at::Tensor& x) { return model->forward(x); }, batch.data);
    return torch::mse_loss(output, batch.target);
  };
  CHECK(fit(batches, {.count_flops = true}, checkpointed).flops == flops_of_loop(batches));
}

TEST_CASE("FitOptions: count_flops, of batches that FitMemory divides") {
  const auto batches = make_batches({16, 16});
  const auto report = fit(batches, {.count_flops = true}, objective, ga::FitMemory{.budget = std::int64_t{1} << 30});
  CHECK(report.flops == flops_of_loop(batches));
}

TEST_CASE("FitOptions: items and FLOP are of all ranks, which may have unequal batches") {
  const std::vector<std::vector<Example>> shares{make_batches({5, 5, 3, 4}), make_batches({2, 7})};
  std::vector<ga::FitReport> reports(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    reports[rank] = fit(shares[rank], {.epochs = 2, .unit = "words", .peak_flops = 1e9}, of_words,
                        ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group});
  });
  for (auto& report : reports) {
    CHECK(report.flops == 2 * (flops_of_loop(shares[0]) + flops_of_loop(shares[1])));
    CHECK(report.items == 2 * 26 * 7);
    CHECK(report.samples == 2 * 26);
    CHECK(report.peak_flops == 2e9);
  }
}

TEST_CASE("FitOptions: items and FLOP include the runs that a fit resumes") {
  const auto batches = make_batches({5, 5, 3, 4});
  const Directory directory;
  const auto run = [&](std::optional<std::int64_t> updates, bool counts) {
    return fit(batches, {.epochs = 2, .updates = updates, .resume = directory / "states", .count_flops = counts},
               of_words, ga::SaveState{.directory = directory / "states", .every_updates = 1});
  };
  const bool all_count = GENERATE(true, false);
  run(1, true);
  run(3, all_count);
  const auto report = run(std::nullopt, true);
  CHECK_FALSE(report.resumed_from.empty());
  CHECK(report.items == 2 * 17 * 7);
  CHECK(report.flops == 2 * flops_of_loop(batches) - (all_count ? 0 : 13 * 272));
  const auto over_all = report.flops / report.seconds;
  CHECK((all_count ? report.flops_per_second == over_all : report.flops_per_second > over_all));
}

TEST_CASE("FitOptions: a peak must be a number; an objective without products is noted") {
  const auto batches = make_batches({5});
  REQUIRE_ERROR("peak_flops must be finite and >= 0, got -1", fit(batches, {.peak_flops = -1}, objective));
  REQUIRE_ERROR("peak_flops must be finite and >= 0, got inf",
                fit(batches, {.peak_flops = std::numeric_limits<double>::infinity()}, objective));
  const auto no_products = [](auto& model, auto& batch) {
    return (model->parameters()[0].sum() - batch.target.mean()).square();
  };
  const auto report = fit(batches, {.count_flops = true}, no_products);
  REQUIRE(report.notes.size() == 1);
  CHECK(contains(report.notes[0], "no FLOP were counted"));
}

TEST_CASE("FitReport: prints items and FLOP per second, and the MFU beside its peak") {
  std::ostringstream text;
  text << ga::FitReport{.seconds = 2,
                        .samples_per_second = 100,
                        .unit = "tokens",
                        .items = 51200,
                        .flops = 2.468e12,
                        .flops_per_second = 1.234e12,
                        .peak_flops = 2.5e12};
  CHECK(
      text.str().starts_with("Time: 2.00\nSamples/second: 100.00\nTokens/second: 25600.00\n"
                             "FLOP/s: 1.23 TFLOP/s, MFU 49.4 % of 2.5 TFLOP/s\n"));
}

TEST_CASE("Progress and Report: show the items, FLOP/s and MFU") {
  const Scratch file;
  const Directory directory;
  const auto batches = make_batches({5, 5, 3});
  fit(batches, {.unit = "words", .peak_flops = 1e6}, of_words, ga::Progress{.line = {.to = file, .elsewhere = 0ms}},
      ga::Report{.path = directory / "run.html"});
  CHECK(contains(file.text(), " words/s | "));
  CHECK(contains(file.text(), "FLOP/s, MFU "));
  CHECK(contains(file.text(), " % of 1 MFLOP/s | "));
  CHECK_FALSE(contains(file.text(), "samples/s"));
  const auto page = text_of(directory / "run.html");
  for (const auto* const part : {"\"words/s\"", "\"MFU\"", "of 1 MFLOP/s", "train/words_per_second", "train/mfu"}) {
    CAPTURE(part);
    CHECK(contains(page, part));
  }
}
