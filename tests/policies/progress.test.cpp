// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/trainer.hpp>

#include "support/files.hpp"

#include <fmt/format.h>

#include <chrono>
#include <limits>
#include <regex>
#include <thread>

namespace ga = gradaccum;
using namespace testing;

namespace {

using namespace std::chrono_literals;
using Batches = std::vector<std::pair<double, int>>;  // a loss, and its number of items

// A model that does not change, so losses are those of the batches.
struct Still : torch::nn::Module {
  at::Tensor parameter = register_parameter("parameter", torch::zeros({1}, at::kDouble));
  torch::optim::SGD sgd{{parameter}, torch::optim::SGDOptions(1e-3)};
};
const auto given_loss = [](Still& net, const std::pair<double, int>& batch) {
  return ga::Loss{net.parameter.sum() * 0 + batch.first, batch.second};
};

// Returns the output without the parts that depend on the clock.
std::vector<std::string> lines_of(const Scratch& file) {
  const auto text = std::regex_replace(file.text(), std::regex(R"( \| [0-9.]+ samples/s( \| [0-9:]+ left)?)"), "");
  return split(text, '\n');
}

ga::Progress all_lines(std::FILE* file) { return {.line = {.to = file, .elsewhere = 0ms}}; }

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("Progress: epoch, update, the mean loss of the epoch so far, and the rate") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, ga::Accumulate{.steps = 2}, all_lines(file));
  trainer.fit(Batches{{1.0, 1}, {2.0, 3}, {0.5, 2}, {0.5, 2}, {7.0, 4}}, {.epochs = 2});
  CHECK(lines_of(file) == Lines{" 10% | epoch 1/2 | update 0", " 20% | epoch 1/2 | update 0",
                                " 30% | epoch 1/2 | update 1 | loss 1.7500 | lr 1.0e-03",
                                " 40% | epoch 1/2 | update 1 | loss 1.7500 | lr 1.0e-03",
                                " 50% | epoch 1/2 | update 2 | loss 1.1250 | lr 1.0e-03",  // (1 + 6 + 1 + 1) / 8
                                " 60% | epoch 2/2 | update 3",                             // starts again
                                " 70% | epoch 2/2 | update 3", " 80% | epoch 2/2 | update 4 | loss 1.7500 | lr 1.0e-03",
                                " 90% | epoch 2/2 | update 4 | loss 1.7500 | lr 1.0e-03",
                                "100% | epoch 2/2 | update 5 | loss 1.1250 | lr 1.0e-03"});
  CHECK(contains(file.text(), " samples/s | "));
  CHECK(contains(file.text(), " left\n"));
}

TEST_CASE("Progress: epochs continue from the last fit") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  const Batches batches{{1.0, 1}, {2.0, 1}};
  trainer.fit(batches, {.epochs = 3});
  const auto before = lines_of(file).size();
  trainer.fit(batches, {.epochs = 2});
  const auto lines = lines_of(file);
  CHECK(Lines(lines.begin() + static_cast<std::ptrdiff_t>(before), lines.end()) ==
        Lines{" 25% | epoch 4/5 | update 6", " 50% | epoch 4/5 | update 7 | loss 1.0000 | lr 1.0e-03",
              " 75% | epoch 5/5 | update 8", "100% | epoch 5/5 | update 9 | loss 1.0000 | lr 1.0e-03"});
}

TEST_CASE("Progress: updates continue from a loaded trainer") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  ga::Archive now;
  trainer.state(now);
  auto values = now.values();
  values["updates"] = std::int64_t{70};
  values["epochs"] = std::int64_t{3};
  ga::Archive saved(values);
  trainer.state(saved);
  trainer.fit(Batches{{1.0, 1}, {2.0, 1}});
  CHECK(lines_of(file) ==
        Lines{" 50% | epoch 4/4 | update 70", "100% | epoch 4/4 | update 71 | loss 1.0000 | lr 1.0e-03"});
}

TEST_CASE("Progress: a resumed fit prints where it begins, and its rate excludes earlier runs") {
  const auto directory = std::filesystem::temp_directory_path() / fmt::format("gradaccum-progress-{}", getpid());
  const Batches batches{{1.0, 1}, {2.0, 1}, {1.0, 1}, {2.0, 1}};
  Scratch file;
  Still first, second;
  ga::Trainer before(first, first.sgd, given_loss, all_lines(file), ga::SaveState{.directory = directory});
  before.fit(batches, {.epochs = 1, .resume = directory});
  CHECK(lines_of(file).front() == fmt::format("no state in {} yet: from the beginning", directory.string()));
  const Scratch other;
  ga::Trainer after(second, second.sgd, given_loss, all_lines(other), ga::SaveState{.directory = directory});
  after.fit(batches, {.epochs = 2, .resume = directory});
  CHECK(lines_of(other).front() == fmt::format("resumed from {}/step-000004, in epoch 2", directory.string()));
  CHECK(lines_of(other).at(1) == " 62% | epoch 2/2 | update 4");
  std::filesystem::remove_all(directory);
}

TEST_CASE("Progress: a limit in updates") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  trainer.fit(Batches{{1.0, 1}, {2.0, 1}}, {.updates = 4});
  CHECK(lines_of(file) == Lines{"epoch 1 | update 0", " 25% | epoch 1 | update 1 | loss 1.0000 | lr 1.0e-03",
                                " 50% | epoch 2 | update 2", " 75% | epoch 2 | update 3 | loss 1.0000 | lr 1.0e-03"});
}

TEST_CASE("Progress: batches without a size") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  std::pair<double, int> batches[] = {{1.0, 1}, {2.0, 1}};
  trainer.fit(batches);
  CHECK(lines_of(file) == Lines{"epoch 1/1 | update 0", "epoch 1/1 | update 1 | loss 1.0000 | lr 1.0e-03"});
}

TEST_CASE("Progress: skipped windows") {
  const Scratch file;
  Still net;
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  trainer.fit(Batches{{std::numeric_limits<double>::quiet_NaN(), 0}, {2.0, 1}, {1.0, 1}});
  CHECK(lines_of(file) == Lines{" 33% | epoch 1/1 | update 0", " 67% | epoch 1/1 | update 0 | 1 skipped",
                                "100% | epoch 1/1 | update 1 | loss 2.0000 | lr 1.0e-03 | 1 skipped"});
}

TEST_CASE("Progress: prints nothing without a stream, and outside of fit") {
  const Scratch file;
  Still net;
  const Batches batches{{1.0, 1}, {2.0, 1}};
  ga::Trainer silent(net, net.sgd, given_loss, ga::Progress{.line = {.to = nullptr, .elsewhere = 0ms}});
  CHECK(silent.fit(batches).updates == 2);
  ga::Trainer trainer(net, net.sgd, given_loss, all_lines(file));
  trainer.step(batches[0]);
  CHECK(file.text().empty());
  trainer.fit(batches);
  const auto shown = file.text();
  CHECK(lines_of(file).size() == 2);
  trainer.step(batches[0]);
  CHECK(file.text() == shown);
}

TEST_CASE("Progress: the rate is that of the fit, over all of its epochs") {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  const Scratch file;
  Still net;
  std::vector<std::chrono::steady_clock::time_point> batches;
  const auto objective = [&](Still& still, const std::pair<double, int>& batch) {
    batches.push_back(now());
    if (batches.size() == 1) std::this_thread::sleep_for(5ms);  // counts in the second epoch, too
    return given_loss(still, batch);
  };
  ga::Trainer trainer(net, net.sgd, objective, all_lines(file));
  std::this_thread::sleep_for(20ms);  // does not count
  const auto start = now();
  trainer.fit(Batches{{1.0, 1}}, {.epochs = 2});
  const double most = seconds(now() - start), least = seconds(batches[1] - batches[0]);
  std::smatch found;
  const auto last = split(file.text(), '\n').back();
  REQUIRE(std::regex_search(last, found, std::regex("([0-9.]+) samples/s")));
  CHECK(std::stod(found[1]) >= 2 / most - 1);
  CHECK(std::stod(found[1]) <= 2 / least + 1);
}
