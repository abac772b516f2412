// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include "support/models.hpp"
#include "support/ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Data {
  at::Tensor inputs = torch::randn({37, 4}, at::kDouble), targets = torch::randn({37, 3}, at::kDouble);
};

auto objective = [](auto& model, auto& batch) {
  return ga::Loss{torch::mse_loss(model->forward(batch.data), batch.target), batch.data.size(0)};
};

struct Outcome {
  torch::nn::Sequential model = make_model();
  std::vector<double> losses, items;
  std::vector<std::int64_t> micro_batches, samples;
  ga::FitReport report;
};

/// One process, or a rank of several; `policies` are beside those that all have.
template <class... Policies>
void train(Outcome& outcome, const Data& data, const ga::ProcessGroup& group, ga::FitOptions options,
           std::int64_t steps, Policies... policies) {
  ga::data::TensorBatches batches(
      data.inputs, data.targets,
      {.batch_size = 3, .shuffle = true, .seed = 3, .rank = group.rank(), .world_size = group.world_size()});
  torch::optim::Adam adam(outcome.model->parameters(), torch::optim::AdamOptions(0.05));
  ga::Trainer trainer(
      outcome.model, adam, objective, ga::Accumulate{.steps = steps}, ga::ClipNorm{.max = 0.5}, std::move(policies)...,
      ga::DataParallel{.group = group, .options = {.bucket_bytes = 100, .seed_by_rank = false}, .check_every = 2},
      [&](const ga::Step& step) {
        outcome.losses.push_back(step.loss.item<double>());
        outcome.items.push_back(step.items);
        outcome.micro_batches.push_back(step.micro_batches);
        outcome.samples.push_back(step.samples);
      });
  outcome.report = trainer.fit(batches, options);
}

}  // namespace

TEST_CASE("DataParallel: ranks are one process, report included") {
  const int world_size = GENERATE(2, 4);
  const std::int64_t steps = GENERATE(1, 3);
  const auto tail = GENERATE(ga::Tail::flush, ga::Tail::carry);
  const Data data;
  const ga::FitOptions options{.epochs = 3, .tail = tail};
  Outcome one;
  train(one, data, ga::ProcessGroup(), options, steps * world_size);

  std::vector<Outcome> ranks(static_cast<std::size_t>(world_size));
  for (auto& rank : ranks) rank.model = make_model();
  {
    const torch::NoGradGuard no_grad;
    ranks[1].model->parameters()[0].zero_();  // rank 0's counts
  }
  tests::as_ranks(world_size, [&](const ga::ProcessGroup& group) {
    train(ranks[static_cast<std::size_t>(group.rank())], data, group, options, steps);
  });
  for (auto& rank : ranks) {
    CHECK(torch::equal(flat(rank.model), flat(ranks[0].model)));
    CHECK(rank.report.updates == ranks[0].report.updates);
    if (tail == ga::Tail::carry) continue;  // windows end elsewhere, then
    CHECK(rank.report.samples == 3 * 37);
    CHECK(distance(rank.model, one.model) < 1e-11);
    CHECK(rank.report.updates == one.report.updates);
    CHECK(rank.items == one.items);
    CHECK(rank.samples == one.samples);
    CHECK(rank.micro_batches == one.micro_batches);
    REQUIRE(rank.losses.size() == one.losses.size());
    for (std::size_t i = 0; i < one.losses.size(); ++i) CHECK(rank.losses[i] == Approx(one.losses[i]).epsilon(1e-11));
  }
}
