// SPDX-License-Identifier: Apache-2.0
//
// The FashionMNIST example has two starting points, the loop by hand and the Trainer, which give the same results, with
// and without checkpoints.
#include "support/catch.hpp"

#include "compare_checkpoint.hpp"

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

namespace {

// Makes images of random pixels, by default 8 batches of 12.
fashion_mnist::Dataset dataset(std::int64_t images = 96) {
  torch::manual_seed(3);
  const auto split = [](std::int64_t rows) {
    return fashion_mnist::Split{torch::rand({rows, 28, 28}), torch::randint(10, {rows})};
  };
  return {split(images), split(24)};
}

struct Trained {
  at::Tensor parameters;
  double loss, accuracy;
  std::shared_ptr<fashion_mnist::Setup> setup;
};

Trained trained(fashion_mnist::Options options, bool with_trainer) {
  options.device = "cpu";
  options.trainer = with_trainer;
  const auto result = fashion_mnist::train(options, dataset());
  return {testing::flat(result.setup->model), result.test["loss"], result.test["accuracy"], result.setup};
}

}  // namespace

TEST_CASE("FashionMNIST: the loop by hand and the Trainer give the same parameters, to the bit") {
  fashion_mnist::Options options;
  options.batch_size = 12;
  options.epochs = 3;
  options.learning_rate = 0.003;
  options.optimizer = GENERATE("sgd", "adamw");
  options.amp = GENERATE("off", "bf16", "fp16");
  options.accumulate = fashion_mnist::AccumulationSchedule(GENERATE("1", "3", "0:5,2:2"));  // 5 leaves a tail
  CAPTURE(options.optimizer, options.amp, options.accumulate.text());
  const auto by_hand = trained(options, false), with_trainer = trained(options, true);
  CHECK(at::equal(by_hand.parameters, with_trainer.parameters));
  CHECK(by_hand.loss == with_trainer.loss);
  CHECK(by_hand.accuracy == with_trainer.accuracy);
  options.seed = 1;
  CHECK_FALSE(at::equal(trained(options, true).parameters, with_trainer.parameters));
}

TEST_CASE("FashionMNIST: both loops plot the loss of each window, also of one that a flush ends") {
  const testing::Directory directory;
  fashion_mnist::Options options;
  options.device = "cpu";
  options.batch_size = 12;
  options.epochs = 2;
  options.accumulate = fashion_mnist::AccumulationSchedule("3");  // 3, 3 and 2 micro-batches
  gradaccum::RunPage page({.path = directory / "page.html"});
  std::vector<const gradaccum::Curve*> losses;
  for (const bool trainer : {false, true}) {
    options.trainer = trainer;
    auto& curves = page.add_run(trainer ? "Trainer" : "by hand");
    fashion_mnist::train(options, dataset(), {}, {.page = &page, .curves = &curves});
    losses.push_back(curves.find("train/loss"));
  }
  REQUIRE(losses[0]->pieces().size() == 6);
  REQUIRE(losses[1]->pieces().size() == 6);
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(losses[0]->pieces()[i].first == losses[1]->pieces()[i].first);
    CHECK(losses[0]->pieces()[i].mean == Approx(losses[1]->pieces()[i].mean).epsilon(1e-6));
  }
}

TEST_CASE("FashionMNIST: a device replays steps as graphs without changing parameters", "[cuda]") {
  if (!torch::cuda::is_available() || !testing::has_graphs(at::kCUDA)) SKIP("needs a CUDA device with graphs");
  auto data = dataset();
  for (auto* split : {&data.train, &data.test}) *split = {split->images.cuda(), split->labels.cuda()};
  fashion_mnist::Options options;
  options.device = "cuda";
  options.batch_size = 12;
  options.accumulate = fashion_mnist::AccumulationSchedule("3");
  options.amp = GENERATE("off", "fp16");
  options.trainer = GENERATE(false, true);
  std::vector<at::Tensor> parameters;
  for (const bool graphs : {true, false}) {
    options.graphs = graphs;
    parameters.push_back(testing::flat(fashion_mnist::train(options, data).setup->model).cpu());
  }
  CHECK(at::equal(parameters[0], parameters[1]));

  options.graphs = true;
  fashion_mnist::Setup setup(options, data);
  auto learned = fashion_mnist::training_objective(setup, options);
  for (auto& batch : setup.batches) learned(setup.model, batch).mean.backward();
  const auto& report = learned.target<fashion_mnist::GraphedObjective>()->report();
  CHECK(report.replayed == 8);
  CHECK(report.eager == 0);
}

TEST_CASE("FashionMNIST: a network with checkpoints trains bitwise the parameters of the plain one") {
  fashion_mnist::Options options;
  options.depth = 4;
  options.batch_size = 12;
  options.epochs = 2;
  options.learning_rate = 0.003;
  options.optimizer = "adamw";
  options.amp = GENERATE("off", "bf16", "fp16");
  options.accumulate = fashion_mnist::AccumulationSchedule("3");
  const bool with_trainer = GENERATE(false, true);
  const auto plain = trained(options, with_trainer);
  CHECK_THROWS(plain.setup->model->plan());
  const auto budget = options.mixed_precision() ? "2MiB" : "150KiB";  // in 16 bits, copies of the weights are kept too
  for (const std::string choice : {"1", "2", "10", budget}) {
    CAPTURE(options.amp, with_trainer, choice);
    options.checkpoint = fashion_mnist::checkpoint_choice(choice);
    const auto checkpointed = trained(options, with_trainer);
    CHECK(at::equal(checkpointed.parameters, plain.parameters));
    CHECK(checkpointed.loss == plain.loss);
    CHECK(checkpointed.accuracy == plain.accuracy);
    const auto plan = checkpointed.setup->model->plan();
    INFO(plan.schedule << ", least " << plan.least_bytes << ", plain " << plan.plain.peak_bytes);
    CHECK((plan.schedule.find('[') == std::string::npos) == (choice == "1"));  // one segment: no recomputation
    if (plan.memory_budget) CHECK(plan.plain.peak_bytes > *plan.memory_budget);
  }
  options.seed = 1;
  CHECK_FALSE(at::equal(trained(options, with_trainer).parameters, plain.parameters));
}

TEST_CASE("FashionMNIST: forward and backward of a network with checkpoints need less memory") {
  fashion_mnist::Options options;
  options.device = "cpu";
  options.depth = 8;
  options.batch_size = 192;
  options.epochs = 1;
  const auto data = dataset(options.batch_size);
  std::vector<fashion_mnist::NamedRun> runs{{"plain", options}, {"segments", options}, {"budget", options}};
  runs[1].options.checkpoint = {.segments = 3};
  runs[2].options.checkpoint = {.memory_budget = 2 << 20};
  fashion_mnist::train_all(runs, data);
  const auto costs = fashion_mnist::measure_passes(runs);
  for (const auto& cost : costs) CHECK(cost.samples == 192);
  CHECK(costs[0].peak_bytes > 8 * 192 * 512 * 4);  // the output of each hidden layer
  CHECK(costs[1].peak_bytes < costs[0].peak_bytes);
  const auto plan = runs[2].result.setup->model->plan();
  CHECK(plan.plain.peak_bytes > (2 << 20));
  CHECK(costs[2].peak_bytes < costs[0].peak_bytes);
}

TEST_CASE("FashionMNIST: the network has the requested depth, and 784-512-512-10 is the default") {
  for (const std::int64_t depth : {1, 2, 7}) {
    auto layers = fashion_mnist::make_layers(depth);
    CHECK(static_cast<std::int64_t>(layers->size()) == fashion_mnist::module_count(depth));
    CHECK(static_cast<std::int64_t>(layers->parameters().size()) == 2 * (depth + 1));
    CHECK(layers->forward(torch::zeros({3, 28, 28})).sizes() == at::IntArrayRef({3, 10}));
  }
  torch::manual_seed(0);
  const torch::nn::Linear last(512, 10), second(512, 512), first(784, 512);  // in the order of their random numbers
  const torch::nn::Sequential written_out(torch::nn::Flatten(), first, torch::nn::ReLU(), second, torch::nn::ReLU(),
                                          last);
  torch::manual_seed(0);
  const fashion_mnist::Network network(fashion_mnist::Options().depth);
  CHECK(fashion_mnist::same_bits(network->parameters(), written_out->parameters()));
}

TEST_CASE("FashionMNIST: --checkpoint is a number of segments or of bytes") {
  using fashion_mnist::checkpoint_choice;
  CHECK(checkpoint_choice("4").segments == 4);
  CHECK(checkpoint_choice("4").memory_budget == 0);
  for (const auto& [text, bytes] : std::vector<std::pair<std::string, std::int64_t>>{{"1B", 1},
                                                                                     {"1000B", 1000},
                                                                                     {"3KiB", 3 << 10},
                                                                                     {"12MiB", 12 << 20},
                                                                                     {"1.5MiB", 3 << 19},
                                                                                     {"2GiB", std::int64_t{1} << 31},
                                                                                     {"0.5KiB", 512},
                                                                                     {"99999999999GiB", 1LL << 62}}) {
    CAPTURE(text);
    CHECK(checkpoint_choice(text).memory_budget == bytes);
    CHECK(checkpoint_choice(text).segments == 0);
  }
  for (const std::string text :
       {"",     "0",    "-1",    "1.5", "x",    "MiB",      "12mib", "12MB", "12 MiB", "12MiBs", "0B",
        "0.5B", "0MiB", "-1MiB", "1e3", "1e3B", "1.2.3MiB", ".MiB",  "nan",  "infB",   "0x1p3B", "99999999999999999999",
        "4,2"}) {
    CAPTURE(text);
    REQUIRE_ERROR("--checkpoint: must be a number of segments (4) or of bytes", checkpoint_choice(text));
    REQUIRE_ERROR("got '" + text + "'", checkpoint_choice(text));
  }
}

TEST_CASE("FashionMNIST: parameters are compared by their bits") {
  using fashion_mnist::same_bits;
  const auto nan = torch::tensor({std::nanf(""), 1.f});
  CHECK(same_bits({nan}, {nan.clone()}));
  CHECK(same_bits({}, {}));
  CHECK_FALSE(same_bits({torch::tensor({0.f})}, {torch::tensor({-0.f})}));
  CHECK_FALSE(same_bits({nan, nan}, {nan}));
}
