// SPDX-License-Identifier: Apache-2.0
//
// The FashionMNIST example has two starting points, the loop by hand and the Trainer, which give the same results, with
// and without checkpoints.
#include "support/catch.hpp"

#include "compare.hpp"
#include "own_loop.hpp"

#include "support/device.hpp"
#include "support/models.hpp"

namespace ga = gradaccum;

namespace {

// Makes images of random pixels, 8 batches of 12.
fashion_mnist::Dataset dataset() {
  torch::manual_seed(3);
  const auto split = [](std::int64_t rows) {
    return fashion_mnist::Split{torch::rand({rows, 28, 28}), torch::randint(10, {rows})};
  };
  return {split(96), split(24)};
}

fashion_mnist::Options with_amp(const char* amp, const char* accumulate) {
  fashion_mnist::Options options;
  options.device = "cpu";
  options.batch_size = 12;
  options.epochs = 3;
  options.learning_rate = 0.003;
  options.optimizer = "adamw";
  options.amp = amp;
  options.accumulate = fashion_mnist::parse_schedule(accumulate);
  return options;
}

struct Trained {
  at::Tensor parameters;
  double loss, accuracy;
};

Trained trained(const fashion_mnist::Options& options, bool with_trainer,
                const fashion_mnist::Dataset& data = dataset()) {
  fashion_mnist::Setup setup(options, data);
  const auto test = with_trainer ? fashion_mnist::train_with_trainer(setup, options).validations.back().found
                                 : fashion_mnist::train_by_hand(setup, options);
  return {testing::flat(setup.model), test["loss"], test["accuracy"]};
}

}  // namespace

TEST_CASE("FashionMNIST: the loop by hand and the Trainer give the same parameters, to the bit") {
  auto options = with_amp(GENERATE("off", "bf16", "fp16"), GENERATE("1", "3", "0:5,2:2"));  // 5 leaves a tail
  options.optimizer = GENERATE("sgd", "adamw");
  CAPTURE(options.optimizer, options.amp, options.accumulate);
  const auto by_hand = trained(options, false), with_trainer = trained(options, true);
  CHECK(at::equal(by_hand.parameters, with_trainer.parameters));
  CHECK(by_hand.loss == with_trainer.loss);
  CHECK(by_hand.accuracy == with_trainer.accuracy);
  options.seed = 1;
  CHECK_FALSE(at::equal(trained(options, true).parameters, with_trainer.parameters));
}

TEST_CASE("FashionMNIST: --compare measures what its options ask for, with the same result") {
  auto options = with_amp("off", "1");
  options.dtype = "float64";
  options.checkpoint = 300 << 10;
  options.memory_budget = 8'600'000;  // a few rows at once
  auto data = dataset();
  for (auto* const split : {&data.train, &data.test}) split->images = split->images.to(at::kDouble);
  const auto runs = fashion_mnist::runs_to_compare(options);
  REQUIRE(runs.size() == 4);
  const auto plain = trained(runs[0].options, true, data);
  for (const auto& run : runs) {
    CAPTURE(run.name);
    CHECK(testing::distance(trained(run.options, true, data).parameters, plain.parameters) < 1e-9);
  }
}

TEST_CASE("FashionMNIST: a device replays steps as graphs without changing parameters", "[cuda]") {
  if (!torch::cuda::is_available() || !testing::has_graphs(at::kCUDA)) SKIP("needs a CUDA device with graphs");
  auto data = dataset();
  for (auto* split : {&data.train, &data.test}) *split = {split->images.cuda(), split->labels.cuda()};
  auto options = with_amp(GENERATE("off", "fp16"), "3");
  options.device = "cuda";
  const auto replayed = trained(options, GENERATE(false, true), data);
  fashion_mnist::Setup setup(options, data);
  auto learned = fashion_mnist::training_objective(setup, options);
  for (auto& batch : setup.batches) learned(setup.model, batch).mean.backward();
  const auto& report = learned.target<fashion_mnist::GraphedObjective>()->report();
  CHECK(report.replayed == 8);
  CHECK(report.eager == 0);

  options.graphs = false;
  CHECK(at::equal(trained(options, false, data).parameters, replayed.parameters));
}

TEST_CASE("FashionMNIST: a network with checkpoints trains bitwise the parameters of the plain one") {
  auto options = with_amp(GENERATE("off", "bf16", "fp16"), "3");
  options.depth = 4;
  const bool with_trainer = GENERATE(false, true);
  CAPTURE(options.amp, with_trainer);
  const auto plain = trained(options, with_trainer);
  options.checkpoint = options.mixed_precision() ? 2 * ga::MiB : 150 << 10;  // copies in 16 bits are kept, too
  const auto checkpointed = trained(options, with_trainer);
  CHECK(at::equal(checkpointed.parameters, plain.parameters));
  CHECK(checkpointed.loss == plain.loss);
  CHECK(checkpointed.accuracy == plain.accuracy);
  options.seed = 1;
  CHECK_FALSE(at::equal(trained(options, with_trainer).parameters, plain.parameters));
}

TEST_CASE("FashionMNIST: the network has the requested depth") {
  for (const std::int64_t depth : {1, 2, 7}) {
    auto layers = fashion_mnist::make_layers(depth);
    CHECK(static_cast<std::int64_t>(layers->parameters().size()) == 2 * (depth + 1));
    CHECK(layers->forward(torch::zeros({3, 28, 28})).sizes() == at::IntArrayRef({3, 10}));
  }
}

TEST_CASE("FashionMNIST: --accumulate is a number or a schedule by epoch") {
  using fashion_mnist::parse_schedule;
  using Schedule = std::map<std::int64_t, std::int64_t>;
  CHECK(parse_schedule("4") == Schedule{{0, 4}});
  CHECK(parse_schedule("4:2,0:8") == Schedule{{0, 8}, {4, 2}});
  for (const std::string text : {"", "0", "-1", "x", "1.5", "4,3", "1:2", "0:2,0:3", "0:", ":2", "0:0", "0:2:3", "0:2,",
                                 "4,", "-1:2,0:2", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_schedule(text), CLI::ValidationError);
  }
}
