// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "demo.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

// The example makes one update from each window's reviews, like one batch. A widespread loop does not, because of two
// mistakes; each alone must give a different result.

namespace {

using Batches = std::vector<gradaccum::data::SequenceBatch>;

constexpr std::size_t window = 8;
constexpr double learning_rate = 1e-3;

/// A small BLOOM in float64, and reviews, of which the last window has 5.
struct Setting {
  testing::Directory directory;
  bloom::Options options;
  bloom::EncodedSplit reviews;

  Setting() {
    bloom::make_demo_files(directory / "files", 30, 1);
    options.model = directory / "files";
    options.train = directory / "files/reviews.csv";
    options.accumulate = window;
    options.learning_rate = learning_rate;
    options.max_length = 64;
    options.device = "cpu";
    const auto rows = bloom::read_reviews(options).rows;
    const auto tokenizer = model_folder().tokenizer;
    const auto encoded = [&](const auto& part) { return bloom::encode(tokenizer, part, options.max_length, "cpu"); };
    reviews = {encoded(rows.train), encoded(rows.validation), encoded(rows.test)};
    REQUIRE(reviews.train.size() == 21);
  }

  bloom::ModelFolder model_folder() const {
    auto folder = bloom::open_model_folder(options.model, 2, "cpu");
    folder.model->to(torch::kDouble);
    return folder;
  }

  /// Returns the micro-batches of the epoch, in its order.
  Batches batches(std::int64_t rows = 1) const {
    Batches all;
    for (auto& batch : reviews.train.training_batches(rows, 3, options.seed)) all.push_back(batch);
    return all;
  }
};

/// Joins rows to one batch, padded to its longest or further.
gradaccum::data::SequenceBatch joined(const Batches& batches, std::size_t from, std::size_t to,
                                      std::int64_t length = 0) {
  gradaccum::data::SequenceBatch all;
  std::vector<at::Tensor> data, target, lengths, indices;
  for (auto i = from; i < std::min(to, batches.size()); ++i) length = std::max(length, batches[i].data.size(1));
  for (auto i = from; i < std::min(to, batches.size()); ++i) {
    data.push_back(torch::constant_pad_nd(batches[i].data, {0, length - batches[i].data.size(1)}, 3));
    target.push_back(batches[i].target);
    lengths.push_back(batches[i].lengths);
    indices.push_back(batches[i].indices);
  }
  return {torch::cat(data), torch::cat(target), torch::cat(lengths), {}, torch::cat(indices)};
}

/// Makes one update from each window as one batch, which the example must match.
at::Tensor large_batches(const Setting& setting, const Batches& batches) {
  auto model = setting.model_folder().model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(learning_rate));
  for (std::size_t from = 0; from < batches.size(); from += window) {
    optimizer.zero_grad();
    bloom::objective(model, joined(batches, from, from + window)).mean.backward();
    optimizer.step();
  }
  return testing::flat(model);
}

struct Habits {
  bool steps_at_multiples = false;  // `if batch % 8 == 0`: after the first micro-batch, and never after the last ones
  bool divides_by_eight = false;    // also windows of fewer than 8
  bool pads = false;                // all to the greatest length: correct, but slow
};

at::Tensor article_loop(const Setting& setting, const Habits& habits) {
  const auto batches = setting.batches();
  auto model = setting.model_folder().model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(learning_rate));
  const auto ends = [&](std::size_t i) {
    return habits.steps_at_multiples ? i % window == 0 : (i + 1) % window == 0 || i + 1 == batches.size();
  };
  for (std::size_t i = 0, begin = 0; i < batches.size(); ++i) {
    auto end = i;
    while (end < batches.size() && !ends(end)) ++end;
    const auto divisor = habits.divides_by_eight ? window : end + 1 - begin;
    const auto batch = joined(batches, i, i + 1, habits.pads ? setting.options.max_length : 0);
    (bloom::objective(model, batch).mean / static_cast<double>(divisor)).backward();
    if (!ends(i)) continue;
    optimizer.step();
    optimizer.zero_grad();
    begin = i + 1;
  }
  return testing::flat(model);
}

}  // namespace

TEST_CASE("bloom: an epoch makes an update for each window as one large batch, the last, smaller one too") {
  Setting setting;
  for (const std::int64_t rows : {1, 2}) {  // of 2: the last micro-batch has one
    setting.options.micro_batch = rows;
    auto folder = setting.model_folder();
    const auto trained = bloom::fit(folder, setting.reviews, setting.options);
    const auto batches = setting.batches(rows);
    CHECK(batches.size() % window != 0);
    CHECK(trained.report.updates == static_cast<std::int64_t>((batches.size() + window - 1) / window));
    CHECK(testing::distance(testing::flat(folder.model), large_batches(setting, batches)) < 1e-10);
  }
}

TEST_CASE("bloom: each mistake of the usual loop changes the result") {
  const Setting setting;
  const auto right = large_batches(setting, setting.batches());
  const auto off = [&](const Habits& habits) { return testing::distance(article_loop(setting, habits), right); };
  CHECK(off({}) < 1e-10);
  CHECK(off({.steps_at_multiples = true}) > 1e-4);
  CHECK(off({.divides_by_eight = true}) > 1e-4);
  CHECK(off({.steps_at_multiples = true, .divides_by_eight = true}) > 1e-4);
}

TEST_CASE("bloom: padding to the greatest length does not change the result") {
  const Setting setting;
  const auto batches = setting.batches();
  auto model = setting.model_folder().model;
  const auto all = joined(batches, 0, batches.size(), 3 * setting.options.max_length);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto alone = bloom::objective(model, batches[i]).output;
    const auto row = static_cast<std::int64_t>(i);
    CHECK(torch::allclose(alone, bloom::objective(model, all).output.slice(0, row, row + 1), 1e-12, 1e-13));
  }
  const auto right = large_batches(setting, batches);
  CHECK(testing::distance(article_loop(setting, {.pads = true}), right) < 1e-10);
}
