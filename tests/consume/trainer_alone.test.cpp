// SPDX-License-Identifier: Apache-2.0
// Includes, header-only, the Trainer and none of the library's optimizers: what it uses has its definitions nevertheless.
#include <gradaccum/trainer.hpp>

#include "support/catch.hpp"
#include "support/files.hpp"

namespace ga = gradaccum;

TEST_CASE("A program with trainer.hpp and LibTorch's optimizer alone saves and resumes") {
  const testing::Directory directory;
  const std::vector<at::Tensor> batches{torch::ones({2, 4}), torch::ones({2, 4})};
  const auto train = [&](std::int64_t updates) {
    torch::nn::Linear model(4, 1);
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ga::Trainer trainer(
        model, sgd, [](auto& net, auto& batch) { return net->forward(batch).square().mean(); },
        ga::SaveState{.directory = directory / "states"});
    return trainer.fit(batches, {.epochs = 2, .updates = updates, .resume = directory / "states"});
  };
  CHECK(train(2).updates == 2);
  CHECK(train(3).resumed_from != "");
}
