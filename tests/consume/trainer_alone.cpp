// SPDX-License-Identifier: Apache-2.0
//
// Includes the Trainer, header-only, and none of the library's optimizers; all definitions that it uses must be
// included. Also linked with umbrella.cpp, which includes the whole library.
#include <gradaccum/trainer.hpp>

#include <torch/torch.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace ga = gradaccum;

/// Defined in umbrella.cpp.
[[gnu::weak]] int updates_in_umbrella(at::Tensor parameter);

namespace {

void require(bool fulfilled, const std::string& what) {
  if (!fulfilled) throw std::runtime_error(what);
}

ga::FitReport train(const std::filesystem::path& states, std::int64_t updates) {
  const std::vector<at::Tensor> batches{torch::ones({2, 4}), torch::ones({2, 4})};
  torch::nn::Linear model(4, 1);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  ga::Trainer trainer(
      model, sgd, [](auto& net, auto& batch) { return net->forward(batch).square().mean(); }, ga::SaveState{.directory = states});
  return trainer.fit(batches, {.epochs = 2, .updates = updates, .resume = states});
}

}  // namespace

int main(int, char* argv[]) {
  const std::filesystem::path states = std::string(argv[0]) + ".states";
  std::filesystem::remove_all(states);
  require(train(states, 2).updates == 2, "two updates are made");
  require(train(states, 3).resumed_from != "", "the training is resumed from the state");
  if (!updates_in_umbrella) return 0;

  auto parameter = torch::zeros({1}).set_requires_grad(true);
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 1});
  parameter.sum().backward();
  require(optimizer.step(), "an update is made");
  optimizer.zero_grad();
  require(updates_in_umbrella(parameter) == 1, "the other file makes one update");
  require(parameter.item<float>() == -3.0f, "both files update the parameter");
}
