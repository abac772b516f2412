// SPDX-License-Identifier: Apache-2.0
//
// The FashionMNIST example has two starting points, the loop by hand and the Trainer: they train alike.
#include "support/catch.hpp"

#include "compare.hpp"

#include "support/models.hpp"

namespace {

// As many images as 16 batches of 12, of random pixels.
fashion_mnist::Dataset dataset() {
  torch::manual_seed(3);
  const auto split = [](std::int64_t rows) {
    return fashion_mnist::Split{torch::rand({rows, 28, 28}), torch::randint(10, {rows})};
  };
  return {split(192), split(24)};
}

struct Trained {
  at::Tensor parameters;
  double loss, accuracy;
};

Trained trained(fashion_mnist::Options options, bool with_trainer) {
  options.device = "cpu";
  options.trainer = with_trainer;
  const auto result = fashion_mnist::train(options, dataset());
  std::vector<at::Tensor> all;
  for (auto& parameter : result.parameters) all.push_back(parameter.flatten());
  return {torch::cat(all), result.test["loss"], result.test["accuracy"]};
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
