// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/replicas.hpp>

#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

/// Models and optimizers for each rank, made before the threads begin: random numbers are everybody's.
struct Rank {
  torch::nn::Sequential model = make_model();
  std::unique_ptr<torch::optim::Adam> adam;
  std::unique_ptr<ga::GradAccumulator<torch::optim::Adam>> optimizer;

  explicit Rank(std::int64_t steps, bool differs = false) {
    if (differs) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(-2);
    }
    adam = std::make_unique<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.1));
    optimizer =
        std::make_unique<ga::GradAccumulator<torch::optim::Adam>>(*adam, ga::GradAccumulatorOptions{.steps = steps});
  }

  void backward(const Example& batch) {
    optimizer->backward(ga::Loss{loss_of(model, batch), static_cast<double>(batch.data.size(0))});
    optimizer->step();
    optimizer->zero_grad();
  }
};

std::vector<Rank> make_ranks(std::size_t number, std::int64_t steps) {
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < number; ++i) ranks.emplace_back(steps, i > 0);
  return ranks;
}

/// The i-th batch is of rank i % ranks; each goes through its own, and along with others where it has less.
void train(std::vector<Rank>& ranks, const std::vector<Example>& batches, ga::ReplicasOptions options) {
  tests::as_ranks(static_cast<int>(ranks.size()), [&](const ga::ProcessGroup& group) {
    const auto number = static_cast<std::size_t>(group.rank());
    auto& rank = ranks[number];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, options);
    for (std::size_t i = number; i < batches.size(); i += ranks.size()) rank.backward(batches[i]);
    rank.optimizer->flush();
    while (replicas.others_continue()) {
      rank.optimizer->step();
      rank.optimizer->zero_grad();
    }
    replicas.check_equal();
  });
}

}  // namespace

TEST_CASE("Replicas: any number of ranks is one process, whatever they have to do") {
  const std::size_t number = GENERATE(2, 4);
  const std::int64_t steps = GENERATE(1, 2, 3);
  const bool overlap = GENERATE(true, false);
  const std::int64_t bucket_bytes = GENERATE(1, 200, 1 << 20);
  for (std::size_t count : {12, 13, 15, 3}) {
    std::vector<std::int64_t> sizes;
    for (std::size_t i = 0; i < count; ++i) sizes.push_back(1 + static_cast<std::int64_t>(i * i % 7));
    const auto batches = make_batches(sizes);

    Rank one(steps * static_cast<std::int64_t>(number));
    for (auto& batch : batches) one.backward(batch);
    one.optimizer->flush();

    auto ranks = make_ranks(number, steps);
    train(ranks, batches, {.bucket_bytes = bucket_bytes, .overlap = overlap, .seed_by_rank = false});
    for (auto& rank : ranks) {
      CHECK(distance(rank.model, one.model) < 1e-12);
      CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
      CHECK(rank.optimizer->updates() == one.optimizer->updates());
    }
    // The mean of means is another.
    Rank other(steps * static_cast<std::int64_t>(number));
    for (auto& batch : batches) {
      other.optimizer->backward(loss_of(other.model, batch));
      other.optimizer->step();
      other.optimizer->zero_grad();
    }
    other.optimizer->flush();
    CHECK(distance(other.model, one.model) > 1e-4);
  }
}
