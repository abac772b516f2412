// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"
#include "support/warnings.hpp"
#include "training_state/bits.hpp"
#include "watching/page.hpp"

#include <algorithm>
#include <csignal>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

using namespace std::chrono_literals;

const auto objective = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };

ga::data::TensorBatches make_data(std::int64_t rows = 40) {
  torch::manual_seed(3);
  return ga::data::TensorBatches(torch::randn({rows, 4}, at::kDouble), torch::randn({rows, 3}, at::kDouble),
                                 {.batch_size = 4, .shuffle = true});
}

ga::Report report_at(const std::filesystem::path& path, std::chrono::duration<double> every = 0s) {
  return {.path = path, .title = "A test", .settings = {{"data", "random <numbers>"}}, .every = every};
}

/// Returns the bits of the curves that do not depend on the clock.
std::string curves_of(const ga::Curves& curves) {
  std::string bits;
  for (auto& [name, curve] : curves.all()) {
    if (name.starts_with("memory/") || name == "train/samples_per_second") continue;
    bits += name + std::to_string(curve.level());
    for (auto& piece : curve.pieces()) {
      for (const auto whole : {piece.first, piece.last, piece.finite, piece.gaps, piece.lowest.update})
        bits += ' ' + std::to_string(whole);
      for (const double real : {piece.lowest.value, piece.highest.value, piece.mean})
        bits.append(reinterpret_cast<const char*>(&real), sizeof real);
    }
  }
  return bits;
}

}  // namespace

TEST_CASE("Report: its numbers equal the FitReport's, and its curves the values that callbacks receive") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data(42), unseen = make_data(20);
  std::map<std::string, std::vector<double>> seen;
  const auto see = [&](const ga::Step& step) {
    seen["train/loss"].push_back(step.loss.item<double>());
    seen["train/lr"].push_back(step.lr);
    seen["train/grad_norm"].push_back(step.grad_norm.item<double>());
  };
  ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 0.5}, see,
                      ga::Schedule{ga::lr::Cosine{.peak = 0.05, .warmup = 3, .total = 30}},
                      ga::Validate(unseen, {.every_updates = 4}), report_at(directory / "run.html"));
  const auto report = trainer.fit(batches, {.epochs = 4});
  const Page page(text_of(directory / "run.html"));
  CHECK(page.state() == "finished");
  CHECK(page["title"] == "A test");
  CHECK(page["fraction"] == 1);
  CHECK(page.number("updates") == report.updates);
  CHECK(page.number("epochs") == 4);
  CHECK(page.number("skipped") == 0);
  CHECK(page.number("samples") == report.samples);
  CHECK(page.number("validations") == report.validations.size());
  CHECK(page.number("seconds") >= report.seconds);  // written a moment later
  CHECK(page.number("samples per second") ==
        static_cast<double>(report.samples) / page.number("seconds").get<double>());
  REQUIRE(report.validations.size() == 6);
  CHECK(page.last("validation/loss") == report.validations.back()["loss"].value());
  double best = std::numeric_limits<double>::infinity();
  for (auto& validation : report.validations) best = std::min(best, validation["loss"].value());
  CHECK(page.lowest("validation/loss") == best);
  const auto& curves = trainer.policy<ga::Report>().curves();
  for (auto& [name, numbers] : seen) {
    REQUIRE(numbers.size() == static_cast<std::size_t>(report.updates));
    CHECK(page.last(name) == numbers.back());
    CHECK(page.lowest(name) == *std::min_element(numbers.begin(), numbers.end()));
    CHECK(page.highest(name) == *std::max_element(numbers.begin(), numbers.end()));
    const auto drawn = page.curve(name)[2];
    REQUIRE(curves.find(name)->pieces().size() == numbers.size());
    REQUIRE(drawn.size() == numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      CHECK(curves.find(name)->pieces()[i].mean == numbers[i]);
      CHECK(curves.find(name)->pieces()[i].first == static_cast<std::int64_t>(i) + 1);
      CHECK(drawn[i][0] == i + 1);
      CHECK(drawn[i][2] == numbers[i]);
    }
  }
  CHECK(page.last("train/samples_per_second") > 0);
  CHECK(page.last("memory/parameters") > 0);
  CHECK(page.tile("updates") == report.updates);
  CHECK(page.tile("train loss") == page.last("train/loss"));
  CHECK(page.setting("data") == "random <numbers>");
  CHECK(contains(page.setting("model"), "SequentialImpl"));
  CHECK(page.setting("optimizer") == "SGD");
  CHECK(page.setting("an update has") == "2 micro-batches, 8 samples");
  CHECK(page.setting("trains for") == "4 epochs");
}

TEST_CASE("Report: the training is bitwise the same as without it") {
  const auto train = [](std::optional<ga::Report> report) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.05);
    auto batches = make_data();
    ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 3}, report);
    trainer.fit(batches, {.epochs = 2});
    return flat(model);
  };
  const Directory directory;
  CHECK(at::equal(train({}), train(report_at(directory / "run.html"))));
}

TEST_CASE("Report: stopped after any micro-batch and resumed, it has the curves of an uninterrupted run") {
  const Directory directory;
  const auto train = [&](const std::string& name, std::int64_t stop_after) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.05);
    auto batches = make_data(22), unseen = make_data(8);
    ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 1}, Stop{stop_after},
                        ga::Validate(unseen, {.every_updates = 2, .every_epochs = 1}),
                        report_at(directory / (name + ".html")), ga::SaveState{.directory = directory / name});
    const auto report = trainer.fit(batches, {.epochs = 3, .resume = directory / name});
    const Page page(text_of(directory / (name + ".html")));
    CHECK(page.state() == (report.signal != 0 ? "interrupted: by SIGTERM" : "finished"));
    CHECK(page.number("updates") == report.updates);
    CHECK(contains(page["settings"].dump(), "resumed from") == !report.resumed_from.empty());
    return std::pair(curves_of(trainer.policy<ga::Report>().curves()), trainer.policy<Stop>().seen);
  };
  const auto [straight, boundaries] = train("straight", -1);
  REQUIRE(boundaries > 15);
  CHECK(straight.find("validation/loss") != std::string::npos);
  for (std::int64_t at = 1; at < boundaries; ++at) {
    const auto name = std::to_string(at);
    const auto stopped = train(name, at).first;
    CHECK(stopped != straight);
    INFO("stopped after boundary " << at << " of " << boundaries);
    CHECK(train(name, -1).first == straight);
  }
}

TEST_CASE("Report: points that are repeated after a resume occur once") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  ga::data::TensorBatches batches(torch::randn({40, 4}, at::kDouble), torch::randn({40, 3}, at::kDouble),
                                  {.batch_size = 4});
  ga::Trainer trainer(model, sgd, objective, report_at(directory / "run.html"));
  trainer.fit(batches, {.updates = 5});
  ga::Archive saved;
  trainer.state(saved);
  trainer.fit(batches, {.updates = 7});
  const auto straight = curves_of(trainer.policy<ga::Report>().curves());
  ga::Archive loading(saved.values());
  trainer.state(loading);
  CHECK(trainer.policy<ga::Report>().curves().find("train/loss")->last().update == 5);
  trainer.fit(batches, {.updates = 7});
  CHECK(points_of(*trainer.policy<ga::Report>().curves().find("train/loss")) == 12);
  CHECK(curves_of(trainer.policy<ga::Report>().curves()) == straight);
}

TEST_CASE("Report: a state without a report is accepted, and curves begin there") {
  const Directory directory;
  const auto train = [&](std::optional<ga::Report> report, std::int64_t updates) {
    auto model = make_model();
    torch::optim::SGD sgd(model->parameters(), 0.05);
    auto batches = make_data();
    ga::Trainer trainer(model, sgd, objective, report, ga::SaveState{.directory = directory / "states"});
    trainer.fit(batches, {.updates = updates, .resume = directory / "states"});
    return report ? trainer.policy<ga::Report>().curves() : ga::Curves();
  };
  train({}, 4);
  const auto curves = train(report_at(directory / "run.html"), 9);
  CHECK(curves.find("train/loss")->pieces().front().first == 5);
  CHECK(points_of(*curves.find("train/loss")) == 5);
}

TEST_CASE("Report: shows how a fit ended") {
  const Directory directory;
  const auto path = directory / "run.html";
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  std::function<void(const ga::Step&)> call = [](const ga::Step&) {};
  ga::Trainer trainer(
      model, sgd, objective, [&call](const ga::Step& step) { call(step); }, report_at(path));
  const auto state = [&] { return Page(text_of(path)).state(); };
  trainer.fit(batches);
  CHECK(state() == "finished");
  call = [&](const ga::Step&) { trainer.stop("it was <enough>"); };
  trainer.fit(batches);
  CHECK(state() == "stopped: it was <enough>");
  call = [&](const ga::Step&) { trainer.interrupt(SIGINT); };
  trainer.fit(batches);
  CHECK(state() == "interrupted: by SIGINT");
  call = [&](const ga::Step&) { throw std::runtime_error("a failure"); };
  REQUIRE_ERROR("a failure", trainer.fit(batches));
  CHECK(state() == "interrupted: by an exception");
  call = [](const ga::Step&) {};
  trainer.fit(batches, {.samples = 12});
  CHECK(state() == "stopped: after 12 samples");
}

TEST_CASE("Report: while the fit runs, the page shows its progress") {
  const Directory directory;
  const auto path = directory / "run.html";
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  std::vector<double> shares;
  const auto look = [&](const ga::Step& step) {
    if (step.update == 1) return;  // the page is written at the boundary
    const Page page(text_of(path));
    CHECK(page.state() == "running");
    CHECK(page.number("updates") == step.update - 1);
    CHECK(page["refresh"] == 1);
    shares.push_back(page["fraction"]);
  };
  ga::Trainer trainer(model, sgd, objective, look, report_at(path));
  trainer.fit(batches, {.updates = 5});
  CHECK(shares == std::vector<double>{0.2, 0.4, 0.6, 0.8});
}

TEST_CASE("Report: a smoke test writes nothing") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  ga::Trainer trainer(model, sgd, objective, report_at(directory / "run.html"));
  trainer.fit(batches, {.smoke = true});
  CHECK_FALSE(std::filesystem::exists(directory / "run.html"));
  CHECK(trainer.policy<ga::Report>().curves().empty());
}

TEST_CASE("Report: NaN is a gap, and a skipped window has no point") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.0);
  int batch = 0;
  const auto given = [&](auto& net, auto& one) {
    ++batch;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return ga::Loss{objective(net, one) * (batch == 3 ? nan : 1.0), batch == 5 ? 0.0 : 4.0};
  };
  auto batches = make_data();
  ga::Trainer trainer(model, sgd, given, report_at(directory / "run.html"));
  trainer.fit(batches, {.on_nan = ga::OnNan::ignore});
  const auto& loss = *trainer.policy<ga::Report>().curves().find("train/loss");
  CHECK(points_of(loss) == 9);
  CHECK(gaps_of(loss) >= 1);
  std::int64_t gaps = 0;
  const auto drawn = Page(text_of(directory / "run.html")).curve("train/loss");
  for (auto& piece : drawn[2]) {
    CHECK(piece[2].is_null() == (piece[7] == 1));
    gaps += piece[7].get<std::int64_t>();
  }
  CHECK(gaps == gaps_of(loss));
}

TEST_CASE("Report: rejected windows are counted, and the first one is named") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  auto batches = make_data();
  ga::Trainer trainer(model, sgd, objective, ga::GuardNorm{.max = 1e-9}, report_at(directory / "run.html"));
  const auto report = trainer.fit(batches);
  const Page page(text_of(directory / "run.html"));
  CHECK(page.number("rejected") == 10);
  CHECK(contains(report.first_rejected, "batch 0 of epoch 0"));
  CHECK(contains(page["settings"].dump(), report.first_rejected));
}

TEST_CASE("Report: a page that can no longer be written does not end the training") {
  const Directory directory;
  std::filesystem::create_directories(directory / "pages");
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  const auto remove = [&](const ga::Step& step) {
    if (step.update == 3) std::filesystem::remove_all(directory / "pages");
  };
  ga::Trainer trainer(model, sgd, objective, remove, report_at(directory / "pages/run.html"));
  const Warnings warnings;
  CHECK(trainer.fit(batches).updates == 10);
  CHECK(Page(text_of(directory / "pages/run.html")).state() == "finished");  // its folder is made again
  CHECK(warnings.texts().empty());
}

TEST_CASE("Report: a full disk does not end the training, but prints a warning, once while it trains or at its end") {
  if (!std::filesystem::exists("/dev/full")) SKIP("no /dev/full");
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  const auto fill = [&](const ga::Step& step) {
    const auto part = directory / "run.html.part";
    if (step.update >= 3 && !std::filesystem::is_symlink(part)) std::filesystem::create_symlink("/dev/full", part);
  };
  const auto warnings_of = [&](std::chrono::duration<double> every) {
    std::filesystem::remove(directory / "run.html.part");
    ga::Trainer trainer(model, sgd, objective, fill, report_at(directory / "run.html", every));
    const Warnings warnings;
    CHECK(trainer.fit(batches).updates == 10);
    auto texts = warnings.texts();
    for (auto& text : texts) {
      CHECK(contains(text, "Report: the page was not written: " + (directory / "run.html").string()));
      CHECK(contains(text, "No space left on device: free some room"));
    }
    return texts.size();
  };
  CHECK(warnings_of(0s) == 1);
  CHECK(warnings_of(std::chrono::hours(1)) == 1);
}

TEST_CASE("Report: invalid options are refused when the trainer is built") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  const auto build = [&](ga::Report report) { ga::Trainer(model, sgd, objective, std::move(report)); };
  REQUIRE_ERROR("Report: path must be given", build({}));
  REQUIRE_ERROR("Report: every must be >= 0 s, got -1 s", build({.path = directory / "run.html", .every = -1s}));
  write_text(directory / "file", "text");
  REQUIRE_ERROR((directory / "file").string() + ": must be a directory", build({.path = directory / "file/run.html"}));
  std::filesystem::create_symlink("/dev/full", directory / "full.html.part");
  if (std::filesystem::exists("/dev/full"))
    REQUIRE_ERROR("full.html: must be written, got No space left on device", build({.path = directory / "full.html"}));
  write_text(directory / "run.html", "of another run");
  build({.path = directory / "run.html"});
  CHECK(text_of(directory / "run.html") == "of another run");  // until there is a point
}

TEST_CASE("Report: of several ranks the first writes, and states resume") {
  const Directory directory;
  const auto train = [&](std::int64_t updates) {
    tests::as_ranks(2, [&](ga::ProcessGroup& group) {
      auto model = make_model();
      torch::optim::SGD sgd(model->parameters(), 0.05);
      ga::data::TensorBatches batches(torch::ones({40, 4}, at::kDouble), torch::ones({40, 3}, at::kDouble),
                                      {.batch_size = 4, .rank = group.rank(), .world_size = group.world_size()});
      const auto path = directory / ("rank" + std::to_string(group.rank()) + ".html");
      ga::Trainer trainer(model, sgd, objective, report_at(path), ga::DataParallel{.group = group},
                          ga::SaveState{.directory = directory / "states"});
      trainer.fit(batches, {.updates = updates, .resume = directory / "states"});
      if (group.rank() != 0) REQUIRE_ERROR("only rank 0 has", trainer.policy<ga::Report>().curves());
    });
  };
  train(2);
  train(5);
  CHECK(std::filesystem::exists(directory / "rank0.html"));
  CHECK_FALSE(std::filesystem::exists(directory / "rank1.html"));
  const Page page(text_of(directory / "rank0.html"));
  CHECK(page.number("updates") == 5);
  CHECK(page.number("samples") == 40);
}

TEST_CASE("Report: a later fit continues the curves") {
  const Directory directory;
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.05);
  auto batches = make_data();
  ga::Trainer trainer(model, sgd, objective, report_at(directory / "run.html"));
  trainer.fit(batches);
  trainer.fit(batches);
  const auto& loss = *trainer.policy<ga::Report>().curves().find("train/loss");
  CHECK(points_of(loss) == 20);
  CHECK(loss.last().update == 20);
  CHECK(Page(text_of(directory / "run.html")).number("updates") == 10);  // the last fit's, as in its report
}
