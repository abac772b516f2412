// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/tensorboard.hpp>
#include <gradaccum/trainer.hpp>

#include "support/event_files.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Killed {};

/// Ends the training after this update like a kill; the update may have been saved or not.
struct KillAfter {
  std::int64_t at = -1;
  const ga::TrainerBase* trainer = nullptr;

  void attach(ga::TrainerBase& to) { trainer = &to; }
  void at_boundary() const {
    if (trainer->updates() == at) throw Killed();
  }
};

using Points = std::vector<std::pair<std::int64_t, float>>;
using AllPoints = std::map<std::string, Points>;

/// Returns whether a curve is the same in every run of the program.
bool is_of_the_training(const std::string& name) {
  return name == "train/loss" || name == "train/grad_norm" || name == "train/lr" || name.starts_with("validation/");
}

AllPoints of_tensorboard(const std::filesystem::path& directory) {
  AllPoints points;
  for (auto& event : events_in(directory))
    if (event.number && is_of_the_training(event.tag)) points[event.tag].emplace_back(event.step, *event.number);
  return points;
}

AllPoints of_page(const ga::Curves& curves) {
  AllPoints points;
  for (auto& [name, curve] : curves.all()) {
    if (!is_of_the_training(name)) continue;
    REQUIRE(curve.level() == 0);  // one point per piece
    for (auto& piece : curve.pieces()) points[name].emplace_back(piece.first, static_cast<float>(piece.mean));
  }
  return points;
}

struct Outcome {
  AllPoints page, tensorboard;
  std::int64_t lines = 0;  // lines of the log
  ga::FitReport report;
};

/// Trains with three windows per epoch.
Outcome train(const std::filesystem::path& folder, std::int64_t kill_at, bool resume, std::int64_t save_every = 2) {
  torch::manual_seed(5);
  const auto x = torch::randn({22, 4}, at::kDouble), y = torch::randn({22, 3}, at::kDouble);
  ga::data::TensorBatches batches(x, y, {.batch_size = 4, .shuffle = true}),
      unseen(y.matmul(torch::ones({3, 4}, at::kDouble)), y);
  auto model = make_model();
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.05));
  const auto objective = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
  ga::Trainer trainer(
      model, adam, objective, ga::Accumulate{.steps = 2}, ga::ClipNorm{.max = 1.0},
      ga::Validate(unseen, {.every_updates = 2, .every_epochs = 1}), ga::EarlyStopping{.patience = 2, .min_delta = 1e3},
      ga::TensorBoard{.directory = folder / "board"}, ga::Report{.path = folder / "run.html"},
      ga::MetricsLog{.path = folder / "log.jsonl", .append = true},
      ga::SaveState{.directory = folder / "states", .every_updates = save_every}, KillAfter{.at = kill_at});
  Outcome outcome;
  try {
    outcome.report =
        trainer.fit(batches, {.epochs = 9, .resume = resume ? folder / "states" : std::filesystem::path()});
  } catch (const Killed&) {
  }
  outcome.page = of_page(trainer.policy<ga::Report>().curves());
  outcome.tensorboard = of_tensorboard(folder / "board");
  outcome.lines = static_cast<std::int64_t>(split(text_of(folder / "log.jsonl"), '\n').size());
  return outcome;
}

std::vector<std::int64_t> updates_of(const Points& points) {
  std::vector<std::int64_t> updates;
  for (auto& [update, value] : points) updates.push_back(update);
  return updates;
}

}  // namespace

TEST_CASE("What people look at: the page and TensorBoard show the same curves") {
  const Directory directory;
  std::filesystem::create_directory(directory / "run");
  const auto run = train(directory / "run", -1, false);
  CHECK(run.page == run.tensorboard);
  CHECK(run.page.size() == 4);
  CHECK(updates_of(run.page.at("train/loss")) == std::vector<std::int64_t>{1, 2, 3, 4});
  CHECK(updates_of(run.page.at("validation/loss")) == std::vector<std::int64_t>{2, 3, 4});
  CHECK(run.report.stopped == "loss was best, " + run.report.stopped.substr(15));
  CHECK(run.lines == 4 + 3);
  std::map<std::int64_t, float> validated;
  for (auto& validation : run.report.validations)
    validated[validation.update] = static_cast<float>(validation.found["loss"]);
  for (auto& [update, loss] : run.page.at("validation/loss")) CHECK(validated.at(update) == loss);
}

TEST_CASE("What people look at: a validation that is repeated because the state is older than it occurs once") {
  const Directory directory;
  for (const auto* name : {"whole", "killed"}) std::filesystem::create_directory(directory / name);
  const auto whole = train(directory / "whole", -1, false, 1);
  train(directory / "killed", 4, false, 1);
  std::filesystem::remove_all(directory / "killed/states/step-000004");  // as if killed during the save
  std::filesystem::remove_all(directory / "killed/states/step-000003.1");
  const auto resumed = train(directory / "killed", -1, true, 1);  // update 3 ended an epoch, which was validated
  CHECK(resumed.page == whole.page);
  CHECK(resumed.tensorboard == whole.tensorboard);
  CHECK(resumed.lines == whole.lines);
}

TEST_CASE("What people look at: stopped early, killed and resumed, a training has one curve without duplicates") {
  const Directory directory;
  for (const auto* name : {"whole", "1", "2", "3"}) std::filesystem::create_directory(directory / name);
  const auto whole = train(directory / "whole", -1, false);
  for (const std::int64_t kill_at : {1, 2, 3}) {
    const auto folder = directory / std::to_string(kill_at);
    const auto killed = train(folder, kill_at, false);
    CHECK(killed.page != whole.page);
    CHECK(killed.tensorboard.at("train/loss").size() == static_cast<std::size_t>(kill_at));
    const auto resumed = train(folder, -1, true);
    CHECK(resumed.page == whole.page);
    CHECK(resumed.tensorboard == whole.tensorboard);
    CHECK(resumed.lines == whole.lines);
    CHECK(resumed.report.stopped == whole.report.stopped);
    const auto again = train(folder, -1, true);  // already finished
    CHECK(again.page == whole.page);
    CHECK(again.tensorboard == whole.tensorboard);
    CHECK(again.lines == whole.lines);
  }
}
