// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/trainer.hpp>

#include "support/ranks.hpp"

#include <string>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

// For a batch of 0 the loss is 0 and the parameter's gradient is NaN; for others all elements of it are 1.
struct Root : torch::nn::Module {
  at::Tensor first = register_parameter("first", torch::zeros({9000}));
  at::Tensor second = register_parameter("second", torch::zeros({9000}));
  torch::optim::SGD sgd{parameters(), torch::optim::SGDOptions(1.0)};
};
const auto root = [](Root& net, double value) {
  return (net.second - net.second.detach() + value).square().sqrt().sum() + net.first.sum();
};

}  // namespace

TEST_CASE("DataParallel: a NaN gradient on one rank is found by all, and no parameter changes") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::optimizer, ga::Shard::gradients);
  const bool clips = GENERATE(false, true);
  const std::int64_t steps = GENERATE(1, 2);
  std::vector<std::string> errors(2);
  std::vector<double> moved(2), spread(2);
  std::vector<ga::FitReport> reports(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    std::vector<double> batches(6 - rank, 1.0);  // the second rank has no batch with the first's last one
    if (rank == 1) batches[3] = 0;
    Root net;
    ga::Trainer trainer(net, net.sgd, root, ga::Accumulate{.steps = steps},
                        ga::DataParallel{.group = group, .shard = shard},
                        clips ? std::optional(ga::ClipNorm{.max = 1e6}) : std::nullopt);
    reports[rank] = trainer.fit(batches, {.on_nan = ga::OnNan::skip});
    moved[rank] = -net.second[8999].item<double>();
    try {
      trainer.fit(batches);
    } catch (const std::exception& error) {
      errors[rank] = error.what();
    }
    spread[rank] = (net.second.max() - net.second.min()).item<double>();
  });
  const double windows = steps == 1 ? 6 : 3;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CAPTURE(rank, shard, steps);
    CHECK(moved[rank] == windows - 1);
    CHECK(spread[rank] == 0);  // and nothing is NaN
    CHECK((reports[rank].skipped == 1 && reports[rank].updates == static_cast<std::int64_t>(windows) - 1));
    CHECK(reports[rank].nan_batches == steps);
    CHECK(contains(reports[rank].first_nan, "batch 3 of epoch 0"));
    CHECK(contains(errors[rank], "the gradients must be finite, got NaN or infinity"));
    CHECK(contains(errors[rank], "of this process or of another"));
  }
  CHECK(contains(errors[0] + errors[1], "in that of second"));
}
