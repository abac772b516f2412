// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/trainer.hpp>

#include "support/models.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

// Returns the number of micro-batches per window; batches are numbers of rows.
std::vector<std::int64_t> windows(ga::Accumulate accumulate, const std::vector<std::int64_t>& sizes,
                                  const ga::FitOptions& options = {}) {
  auto model = make_model();
  torch::optim::SGD sgd(model->parameters(), 0.1);
  std::vector<std::int64_t> counts;
  ga::Trainer trainer(
      model, sgd, [](auto& net, auto& batch) { return loss_of(net, batch); }, std::move(accumulate),
      [&](const ga::Step& step) { counts.push_back(step.micro_batches); });
  trainer.fit(make_batches(sizes), options);
  return counts;
}

using Counts = std::vector<std::int64_t>;
const Counts five{2, 2, 2, 2, 2};

}  // namespace

TEST_CASE("Accumulate: a number of micro-batches per update") {
  CHECK(windows({}, five) == Counts{1, 1, 1, 1, 1});
  CHECK(windows({.steps = 2}, five) == Counts{2, 2, 1});
  CHECK(windows({.steps = 5}, five) == Counts{5});
  CHECK(windows({.steps = 9}, five) == Counts{5});
}

TEST_CASE("Accumulate: by epoch") {
  CHECK(windows({.schedule = {{0, 3}, {2, 2}}}, five, {.epochs = 4}) == Counts{3, 2, 3, 2, 2, 2, 1, 2, 2, 1});
  CHECK(windows({.schedule = {{1, 5}}}, five, {.epochs = 2}) == Counts{1, 1, 1, 1, 1, 5});  // `steps` before epoch 1
  CHECK(windows({.steps = 4, .schedule = {{1, 5}}}, five, {.epochs = 2}) == Counts{4, 1, 5});
}

TEST_CASE("Accumulate: a window that is carried into an epoch with another number keeps its own") {
  CHECK(windows({.schedule = {{0, 3}, {1, 2}}}, five, {.epochs = 2, .tail = ga::Tail::carry}) == Counts{3, 3, 2, 2});
}

TEST_CASE("Accumulate: by samples, for any micro-batches") {
  CHECK(windows({.batch_size = 4}, five) == Counts{2, 2, 1});
  CHECK(windows({.batch_size = 5}, five) == Counts{3, 2});
  CHECK(windows({.batch_size = 1}, five) == Counts{1, 1, 1, 1, 1});
  CHECK(windows({.batch_size = 8}, {1, 1, 6, 8, 3, 5, 2}) == Counts{3, 1, 2, 1});
}

TEST_CASE("Accumulate: invalid options are refused when the trainer is built") {
  REQUIRE_ERROR("Accumulate: steps must be >= 1, got 0", windows({.steps = 0}, five));
  REQUIRE_ERROR("Accumulate: batch_size must be >= 1, or 0 to use steps, got -4", windows({.batch_size = -4}, five));
  REQUIRE_ERROR("batch_size must come without steps and schedule, which also say when a window is full",
                windows({.steps = 2, .batch_size = 4}, five));
  REQUIRE_ERROR("which also say when a window is full", windows({.schedule = {{0, 2}}, .batch_size = 4}, five));
  REQUIRE_ERROR("must have epochs >= 0 and steps >= 1, got {0, 0}", windows({.schedule = {{0, 0}}}, five));
  REQUIRE_ERROR("must have epochs >= 0 and steps >= 1, got {-1, 2}", windows({.schedule = {{-1, 2}}}, five));
  REQUIRE_ERROR("accumulate_in must be a floating dtype", windows({.steps = 2, .accumulate_in = at::kInt}, five));
}
