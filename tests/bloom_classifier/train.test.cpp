// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "demo.hpp"
#include "demo_of_size.hpp"
#include "predict.hpp"
#include "support/files.hpp"

#include <algorithm>
#include <csignal>
#include <functional>
#include <string>
#include <vector>

namespace ga = gradaccum;

namespace {

using bloom::Options;

/// A policy: ends the fit after a number of micro-batches, tails and epochs, as a signal does.
struct StopAfter {
  int boundaries = 0, seen = 0;
  std::function<void()> stop = {};
  void attach(auto& trainer) {
    stop = [&trainer] { trainer.interrupt(SIGTERM); };
  }
  void at_boundary() {
    if (++seen == boundaries) stop();
  }
};

struct Outcome {
  bloom::Trained trained;
  std::vector<at::Tensor> parameters;

  bool operator==(const Outcome& other) const {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].equal(other.parameters[i])) return false;
    return trained.report.updates == other.trained.report.updates &&
           trained.test["accuracy"] == other.trained.test["accuracy"];
  }
};

Options options_for(const std::filesystem::path& files) {
  Options options;
  options.model = files;
  options.train = files / "reviews.csv";
  options.accumulate = 3;
  options.epochs = 2;
  options.learning_rate = 1e-3;
  options.optimizer = "adamw";
  options.device = "cpu";
  options.save_every = 4;
  return options;
}

Outcome outcome_of(const Options& options, int stop_after = 0, std::uint64_t seed = 1) {
  const auto reviews = bloom::read_reviews(options);
  torch::manual_seed(static_cast<std::int64_t>(seed));
  auto folder = bloom::open_model_folder(options.model, reviews.num_labels, options.device, options.parameter_type());
  const auto encoded = [&](const auto& rows) { return bloom::encode(folder.tokenizer, rows, 64, options.device); };
  const bloom::EncodedSplit ids{encoded(reviews.rows.train), encoded(reviews.rows.validation),
                                encoded(reviews.rows.test)};
  Outcome outcome{.trained = bloom::fit(folder, ids, options, StopAfter{stop_after}), .parameters = {}};
  for (auto& parameter : folder.model->parameters()) outcome.parameters.push_back(parameter.detach().clone());
  return outcome;
}

}  // namespace

TEST_CASE("bloom: a language model learns each next word, and no padding") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto folder = bloom::open_model_folder(directory / "files", 2, "cpu", torch::kDouble);
  const auto ids = torch::tensor({{5, 9, 2, 7}, {8, 4, 0, 0}}, torch::kLong);
  ids[1].slice(0, 2).fill_(folder.padding());
  const ga::data::SequenceBatch batch{.data = ids,
                                      .target = torch::zeros({2}, torch::kLong),
                                      .lengths = torch::tensor({4, 2}, torch::kLong),
                                      .target_lengths = {},
                                      .indices = torch::arange(2),
                                      .tokens = 6};
  const auto loss = bloom::next_word_objective(folder.model, batch);
  CHECK(loss.items == 4);
  // By all logits, of each text alone, whose last token predicts nothing.
  at::Tensor sum = torch::zeros({}, torch::kDouble);
  auto& transformer = *folder.model->transformer;
  for (const auto& text : {ids.slice(0, 0, 1), ids.slice(0, 1, 2).slice(1, 0, 2)}) {
    const auto logits = transformer.all_tokens(text)[0].matmul(transformer.word_embeddings->weight.t());
    for (std::int64_t i = 0; i + 1 < text.size(1); ++i)
      sum = sum - logits[i].log_softmax(0)[text[0][i + 1].item<std::int64_t>()];
  }
  CHECK(loss.mean.item<double>() == Approx(sum.item<double>() / 4).epsilon(1e-12));
  loss.backward();
  const auto gradient = transformer.word_embeddings->weight.grad().clone();
  folder.model->zero_grad();
  (sum / 4).backward();
  CHECK(at::allclose(gradient, transformer.word_embeddings->weight.grad(), 1e-10, 1e-12));
}

TEST_CASE("bloom: stopped in the middle of an epoch or of a window, a training resumes bitwise") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  const auto straight = outcome_of(options);
  CHECK(straight.trained.report.updates == 14);  // of 21 reviews, twice
  options.resume = true;
  for (const int boundary : {1, 8, 21, 23, 40}) {
    options.save = directory / std::to_string(boundary);
    CHECK(outcome_of(options, boundary).trained.report.signal == SIGTERM);
    const auto resumed = outcome_of(options, 0, /*seed=*/2);
    INFO("after boundary " << boundary);
    CHECK_FALSE(resumed.trained.report.resumed_from.empty());
    CHECK(resumed == straight);
  }
  options.learning_rate = 2e-3;
  options.save.clear();
  options.resume = false;
  CHECK_FALSE(outcome_of(options) == straight);
}

TEST_CASE("bloom: techniques that save memory, with the same bits") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  options.epochs = 1;
  const auto plain = outcome_of(options);
  options.segments = 1;
  CHECK(outcome_of(options) == plain);
}

TEST_CASE("bloom: steps in backward give the same bits; bfloat16 weights stay finite, and resume bitwise") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  options.epochs = 1;
  options.accumulate = 1;
  options.micro_batch = 3;
  const auto plain = outcome_of(options);
  options.in_backward = true;
  CHECK(outcome_of(options) == plain);
  for (const auto* optimizer : {"adamw8bit", "adafactor"}) {
    INFO(optimizer);
    options.optimizer = optimizer;
    options.precision = "bf16-true";
    options.save.clear();
    options.resume = false;
    const auto straight = outcome_of(options);
    for (const auto& parameter : straight.parameters) {
      CHECK(parameter.scalar_type() == at::kBFloat16);
      CHECK(parameter.isfinite().all().item<bool>());
    }
    options.save = directory / optimizer;
    options.resume = true;
    CHECK(outcome_of(options, /*stop_after=*/4).trained.report.signal == SIGTERM);
    CHECK(outcome_of(options, 0, /*seed=*/2) == straight);
  }
  options.precision = "32";
  options.save.clear();
  CHECK(outcome_of(options).parameters[0].scalar_type() == at::kFloat);
}

TEST_CASE("bloom: updates within a memory budget match those of the whole batches") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  options.epochs = 1;
  options.accumulate = 12;
  auto at_once = options;
  at_once.micro_batch = options.micro_batch * options.accumulate;
  at_once.accumulate = 1;
  options.memory_budget = 3 << 20;
  const auto divided = outcome_of(options), whole = outcome_of(at_once);
  CHECK(divided.trained.report.updates == whole.trained.report.updates);
  double most = 0;
  for (std::size_t i = 0; i < whole.parameters.size(); ++i)
    most = std::max(most, (divided.parameters[i] - whole.parameters[i]).norm().item<double>() /
                              whole.parameters[i].norm().clamp_min(1e-3).item<double>());
  CHECK(most < 1e-2);  // Adam divides by the square root of small numbers, which amplifies rounding
}

TEST_CASE("bloom: only necessary padding is added") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 40, 1);
  auto options = options_for(directory / "files");
  options.epochs = 1;
  const auto alone = outcome_of(options).trained;
  CHECK(alone.tokens == alone.padded);
  options.micro_batch = 4;
  const auto together = outcome_of(options).trained;
  CHECK(together.tokens == alone.tokens);
  CHECK(together.padded == together.tokens);
}

TEST_CASE("bloom: a training ends after a limit of updates or minutes, before its epochs") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  CHECK(outcome_of(options).trained.report.updates == 14);
  options.updates = 9;
  const auto updates = outcome_of(options).trained;
  CHECK(updates.report.updates == 9);
  CHECK(updates.report.epochs == 2);
  options.updates = 15;
  CHECK(outcome_of(options).trained.report.updates == 14);
  options.minutes = 1e-9;
  const auto minutes = outcome_of(options).trained;
  CHECK(minutes.report.updates == 1);
  CHECK(minutes.report.samples == 3);
  CHECK(minutes.training_seconds > 0);
  CHECK(minutes.training_seconds <= minutes.report.seconds);
  options.minutes = 1e6;
  CHECK(outcome_of(options).trained.report.updates == 14);
}

TEST_CASE("bloom: a part of the reviews is evenly spaced") {
  const auto reviews = bloom::generated_reviews(10, 1);
  CHECK(bloom::some_of(reviews, 0) == reviews);
  CHECK(bloom::some_of(reviews, 10) == reviews);
  CHECK(bloom::some_of(reviews, 11) == reviews);
  CHECK(bloom::some_of(reviews, 3) == std::vector{reviews[0], reviews[3], reviews[6]});
}

TEST_CASE("bloom: texts get the same predictions together and one at a time, in their order") {
  const testing::Directory directory;
  bloom::make_demo_files(directory / "files", 30, 1);
  auto options = options_for(directory / "files");
  auto folder = bloom::open_model_folder(options.model, {}, options.device);
  std::vector<std::string> texts;
  for (auto& review : bloom::generated_reviews(20, 3, {.length_scale = 0.1})) texts.push_back(review.text);
  texts.push_back(texts.front());
  const auto together = bloom::predict(folder, texts, options);
  options.batch_tokens = 0;
  const auto alone = bloom::predict(folder, texts, options);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto single = bloom::predict(folder, {texts[i]}, options).front();
    CHECK(alone[i].label == single.label);
    CHECK(alone[i].probability == single.probability);
    CHECK(together[i].label == alone[i].label);
    CHECK(together[i].probability == Approx(alone[i].probability).epsilon(1e-5));
  }
}

TEST_CASE("bloom: the demo of a size makes its folder once, and then reuses it") {
  const testing::Directory directory;
  bloom::Options options;
  options.demo_files = directory / "model";
  options.made.size = {.layers = 2, .width = 16, .heads = 2, .words = 400};
  options.made.reviews = 30;
  options.max_length = 64;
  options.updates = 1;
  options.device = "cpu";
  options.evaluate = 2;
  bloom::demo_of_size(options);
  const auto written = std::filesystem::last_write_time(directory / "model" / "tokenizer.json");
  bloom::demo_of_size(options);
  CHECK(std::filesystem::last_write_time(directory / "model" / "tokenizer.json") == written);
  options.made.size.layers = 3;
  REQUIRE_ERROR("model: must be of the size of --size, 16336 parameters, got", bloom::demo_of_size(options));
}
