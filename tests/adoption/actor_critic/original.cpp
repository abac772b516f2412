// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdio>
#include <utility>
#include <vector>

#include "options.hpp"

namespace {

struct Rollout {
  torch::Tensor states, actions, returns;
};

struct ActorCriticImpl : torch::nn::Module {
  torch::nn::Linear trunk = register_module("trunk", torch::nn::Linear(4, 32));
  torch::nn::Linear actor = register_module("actor", torch::nn::Linear(32, 3));
  torch::nn::Linear critic = register_module("critic", torch::nn::Linear(32, 1));

  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& states) {
    auto features = torch::tanh(trunk->forward(states));
    return {actor->forward(features), critic->forward(features).squeeze(-1)};
  }
};
TORCH_MODULE(ActorCritic);

Rollout record(int64_t count) {
  auto generator = at::detail::createCPUGenerator(7);
  auto states = torch::randn({count, 4}, generator);
  auto actions = torch::randint(0, 3, {count}, generator, torch::kLong);
  auto returns = states.gather(1, actions.unsqueeze(1)).squeeze(1) + 0.5 * states.select(1, 3) +
                 0.1 * torch::randn({count}, generator);
  return {states, actions, returns};
}

std::vector<Rollout> split(const Rollout& rollout, int64_t batch_size) {
  std::vector<Rollout> batches;
  for (int64_t start = 0; start < rollout.states.size(0); start += batch_size) {
    const auto end = start + batch_size;
    batches.push_back({rollout.states.slice(0, start, end), rollout.actions.slice(0, start, end),
                       rollout.returns.slice(0, start, end)});
  }
  return batches;
}

}  // namespace

int main(int argc, char* argv[]) {
  const auto options = adoption::parse(argc, argv);
  const auto batches = split(record(64), options.batch_size);

  ActorCritic model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));

  for (int epoch = 1; epoch <= 2; ++epoch) {
    torch::Tensor policy_loss, value_loss;
    for (const auto& batch : batches) {
      auto [logits, values] = model->forward(batch.states);
      auto log_probs = torch::log_softmax(logits, 1).gather(1, batch.actions.unsqueeze(1)).squeeze(1);
      auto advantages = (batch.returns - values).detach();
      policy_loss = -(log_probs * advantages).mean();
      value_loss = torch::mse_loss(values, batch.returns);

      optimizer.zero_grad();
      policy_loss.backward({}, /*retain_graph=*/true);
      value_loss.backward();
      optimizer.step();
    }
    std::printf("epoch %d: policy loss %.4f, value loss %.4f\n", epoch, policy_loss.item<double>(),
                value_loss.item<double>());
  }
  adoption::save(options, model->parameters());
}
