// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"

#include <chrono>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <map>
#include <stdexcept>

namespace ga = gradaccum;
using namespace testing;

namespace {

using Batches = std::vector<std::pair<double, int>>;  // loss and slope, and the number of items

struct Net : torch::nn::Module {
  at::Tensor parameter = register_parameter("parameter", torch::zeros({2}, at::kDouble));
  torch::optim::SGD sgd{{parameter}, torch::optim::SGDOptions(0.0)};  // a rate of 0 keeps the losses of the batches
};
const auto given_loss = [](Net& net, const std::pair<double, int>& batch) {
  return ga::Loss{net.parameter.sum() * batch.first + batch.first, batch.second};
};

using Row = std::map<std::string, std::string>;

std::vector<Row> rows_of(const std::filesystem::path& csv) {
  const auto lines = split(text_of(csv), '\n');
  const auto names = split(lines.at(0), ',');
  std::vector<Row> rows;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const auto cells = split(lines[i], ',');
    REQUIRE(cells.size() == names.size());
    for (rows.emplace_back(); const auto& name : names) rows.back()[name] = cells[rows.back().size()];
  }
  return rows;
}

std::vector<std::string> column(const std::filesystem::path& csv, const std::string& name) {
  std::vector<std::string> cells;
  for (auto& row : rows_of(csv)) cells.push_back(row.at(name));
  return cells;
}

using Cells = std::vector<std::string>;

}  // namespace

TEST_CASE("MetricsLog: writes a line for each window") {
  const Directory directory;
  const auto path = directory / "train.csv";
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::Accumulate{.steps = 2}, ga::MetricsLog{.path = path});
  trainer.fit(Batches{{1.0, 1}, {2.0, 3}, {0.5, 2}}, {.epochs = 2});
  CHECK(split(text_of(path), '\n')[0] == "update,epoch,samples,items,micro_batches,moved,loss,grad_norm,lr,seconds");
  CHECK(column(path, "update") == Cells{"1", "2", "3", "4"});
  CHECK(column(path, "epoch") == Cells{"0", "0", "1", "1"});
  CHECK(column(path, "samples") == Cells{"2", "3", "5", "6"});
  CHECK(column(path, "items") == Cells{"4", "2", "4", "2"});
  CHECK(column(path, "micro_batches") == Cells{"2", "1", "2", "1"});
  CHECK(column(path, "moved") == Cells{"1", "1", "1", "1"});
  CHECK(column(path, "loss") == Cells{"1.75", "0.5", "1.75", "0.5"});
  CHECK(column(path, "grad_norm") == Cells{"nan", "nan", "nan", "nan"});  // without clipping
  CHECK(column(path, "lr") == Cells{"0", "0", "0", "0"});
  double before = 0;
  for (auto& seconds : column(path, "seconds")) {
    CHECK(std::stod(seconds) >= before);
    before = std::stod(seconds);
  }
  CHECK(before > 0);
}

TEST_CASE("MetricsLog: writes the norm before clipping, if a policy clips") {
  const Directory directory;
  const auto path = directory / "train.csv";
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path}, ga::ClipNorm{.max = 0.01});
  trainer.fit(Batches{{1.0, 1}, {3.0, 1}});
  const auto norms = column(path, "grad_norm");
  REQUIRE(norms.size() == 2);
  CHECK(std::stod(norms[0]) == Approx(std::sqrt(2.0)).epsilon(1e-14));
  CHECK(std::stod(norms[1]) == Approx(3 * std::sqrt(2.0)).epsilon(1e-14));
}

TEST_CASE("MetricsLog: skipped windows have a line, too") {
  const Directory directory;
  const auto path = directory / "train.csv";
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path});
  trainer.fit(Batches{{1.0, 1}, {2.0, 0}, {4.0, 1}});
  CHECK(column(path, "moved") == Cells{"1", "0", "1"});
  CHECK(column(path, "update") == Cells{"1", "1", "2"});
  CHECK(column(path, "loss") == Cells{"1", "nan", "4"});
  CHECK(column(path, "items") == Cells{"1", "0", "1"});
}

TEST_CASE("MetricsLog: writes lines at intervals") {
  const Directory directory;
  const auto path = directory / "train.csv";
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path, .every = 3});
  const Batches batches(4, {1.0, 1});
  trainer.fit(batches);
  CHECK(column(path, "update") == Cells{"3"});
  trainer.fit(batches);  // continues to count
  CHECK(column(path, "update") == Cells{"3", "6"});
  CHECK(column(path, "samples") == Cells{"3", "2"});  // of this fit
}

TEST_CASE("MetricsLog: skipped windows count for the interval") {
  const Directory directory;
  const auto path = directory / "train.csv";
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path, .every = 2});
  trainer.fit(Batches{{1.0, 1}, {2.0, 0}, {4.0, 1}, {5.0, 1}});
  CHECK(column(path, "update") == Cells{"1", "3"});
}

TEST_CASE("MetricsLog: JSON Lines, started again or continued") {
  const Directory directory;
  const auto path = directory / "train.jsonl";
  const Batches batches{{0.25, 1}};
  const auto train = [&](bool append) {
    Net net;
    ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path, .append = append});
    trainer.fit(batches);
    return split(text_of(path), '\n');
  };
  CHECK(train(false).size() == 1);
  CHECK(train(true).size() == 2);
  CHECK(train(true).size() == 3);
  const auto lines = train(false);
  REQUIRE(lines.size() == 1);
  CHECK(
      lines[0].starts_with("{\"update\": 1, \"epoch\": 0, \"samples\": 1, \"items\": 1, \"micro_batches\": 1, "
                           "\"moved\": 1, \"loss\": 0.25, \"grad_norm\": null, \"lr\": 0, \"seconds\": "));
}

TEST_CASE("MetricsLog: invalid options are refused when the trainer is built") {
  const Directory directory;
  Net net;
  const auto build = [&](ga::MetricsLog log) { ga::Trainer(net, net.sgd, given_loss, std::move(log)); };
  write_text(directory / "file", "text");
  REQUIRE_ERROR((directory / "file").string() + ": must be a directory, or one that can be created, got File exists",
                build({.path = directory / "file/train.csv"}));
  REQUIRE_ERROR("the name must end in .csv or .jsonl", build({}));
  REQUIRE_ERROR("MetricsLog: every must be >= 1, got 0", build({.path = directory / "train.csv", .every = 0}));
  REQUIRE_ERROR("MetricsLog: flush_every must be >= 0 seconds, got -1",
                build({.path = directory / "train.csv", .flush_every = std::chrono::seconds(-1)}));
  CHECK_FALSE(std::filesystem::exists(directory / "train.csv"));
}

TEST_CASE("MetricsLog: creates its folder") {
  const Directory directory;
  Net net;
  ga::Trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = directory / "is/made/train.csv"});
  CHECK(std::filesystem::exists(directory / "is/made/train.csv"));
}

TEST_CASE("MetricsLog: a file of other columns stops the training, and stays as it is") {
  const Directory directory;
  const auto path = directory / "train.csv";
  write_text(path, "epoch,loss\n0,0.5\n");
  Net net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path, .append = true});
  REQUIRE_ERROR("its columns are 'epoch,loss', got 'update,epoch,", trainer.fit(Batches{{1.0, 1}}));
  CHECK(text_of(path) == "epoch,loss\n0,0.5\n");
  CHECK(trainer.window().micro_batches == 0);
}

TEST_CASE("MetricsLog: validations have separate lines") {
  const Directory directory;
  const Batches batches{{1.0, 1}, {2.0, 1}, {3.0, 1}};
  Batches unseen{{4.0, 2}};
  const auto train = [&](const std::filesystem::path& path) {
    Net net;
    ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path},
                        ga::Validate(unseen, {.every_updates = 2, .every_epochs = 1}),
                        ga::Validate(unseen, {.name = "other"}));
    trainer.fit(batches);
  };
  train(directory / "train.csv");
  CHECK(column(directory / "train.csv", "update") == Cells{"1", "2", "3"});
  CHECK(split(text_of(directory / "train.validation.csv"), '\n')[0] == "update,epoch,samples,seconds,validation/loss");
  CHECK(column(directory / "train.validation.csv", "update") == Cells{"2", "3"});
  CHECK(column(directory / "train.validation.csv", "samples") == Cells{"2", "3"});
  CHECK(column(directory / "train.validation.csv", "validation/loss") == Cells{"4", "4"});
  CHECK(column(directory / "train.other.csv", "other/loss") == Cells{"4"});
  train(directory / "train.jsonl");
  const auto lines = split(text_of(directory / "train.jsonl"), '\n');
  REQUIRE(lines.size() == 6);
  CHECK(lines[2].starts_with("{\"update\": 2, \"epoch\": 0, \"samples\": 2, \"seconds\": "));
  CHECK(lines[2].ends_with(", \"validation/loss\": 4}"));
  CHECK(lines[5].ends_with(", \"other/loss\": 4}"));
}

TEST_CASE("MetricsLog: lines are buffered, but not when a state is saved, and not beyond the end of fit") {
  const Directory directory;
  const Batches batches{{1.0, 1}, {2.0, 1}, {3.0, 1}, {4.0, 1}, {5.0, 1}};
  const auto path = directory / "train.csv", other = directory / "train.jsonl";
  std::vector<std::size_t> lines;
  std::int64_t fail_at = 0;
  Net net;
  ga::Trainer trainer(
      net, net.sgd, given_loss, ga::SaveState{.directory = directory / "states", .every_updates = 3},
      [&](const ga::Step& step) {
        lines.push_back(rows_of(path).size());
        if (step.update == fail_at) throw std::runtime_error("failed");
      },
      ga::MetricsLog{.path = path, .flush_every = std::chrono::hours(1)},
      ga::MetricsLog{.path = other, .flush_every = std::chrono::hours(1)});
  trainer.fit(batches);
  CHECK(lines == std::vector<std::size_t>{1, 1, 1, 3, 3});  // the first does not wait, after_window comes first
  CHECK(column(path, "update") == Cells{"1", "2", "3", "4", "5"});
  CHECK(split(text_of(other), '\n').size() == 5);
  fail_at = 7;
  CHECK_THROWS_WITH(trainer.fit(batches), "failed");
  CHECK(column(path, "update") == Cells{"1", "2", "3", "4", "5", "6", "7"});
}

TEST_CASE("MetricsLog: a killed and resumed run has each line once") {
  const Directory directory;
  const Batches batches{{1.0, 1}, {2.0, 1}, {3.0, 1}, {4.0, 1}, {5.0, 1}};
  Batches unseen{{4.0, 2}};
  const auto train = [&](const std::filesystem::path& path, std::int64_t until, std::int64_t every, bool resume) {
    Net net;
    ga::Trainer trainer(net, net.sgd, given_loss, ga::MetricsLog{.path = path, .append = true},
                        ga::Validate(unseen, {.every_updates = 2}),
                        ga::SaveState{.directory = directory / "states", .every_updates = every});
    trainer.fit(batches, {.epochs = 2, .updates = until, .resume = resume ? directory / "states" : ""});
  };
  const auto without_times = [](const std::filesystem::path& csv) {
    auto text = std::string();
    for (auto& row : rows_of(csv))
      for (auto& [name, cell] : row)
        if (name != "seconds") text += name + "=" + cell + ' ';
    return text;
  };
  train(directory / "whole.csv", 10, 3, false);
  const auto whole = without_times(directory / "whole.csv"),
             validated = without_times(directory / "whole.validation.csv");
  std::filesystem::remove_all(directory / "states");

  const auto path = directory / "train.csv";
  train(path, 6, 3, false);
  std::filesystem::remove_all(directory / "states/step-000006");  // as if it had been killed before the save
  train(path, 10, 100, true);
  CHECK(without_times(path) == whole);
  CHECK(without_times(directory / "train.validation.csv") == validated);
  CHECK(column(path, "update") == Cells{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10"});
}
