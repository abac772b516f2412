// SPDX-License-Identifier: Apache-2.0
//
// A training step of a network so small (8-8-8-10, one sample) that overhead takes almost all time. Bound: forward and
// backward alone.

#include <gradaccum/optim/adamw.hpp>

#include "harness.hpp"

namespace ga = gradaccum;

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::ReLU(), torch::nn::Linear(8, 8), torch::nn::ReLU(),
                               torch::nn::Linear(8, 10));
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "A training step of a tiny network against LibTorch's AdamW");
  auto ours = make_model(), peer = make_model(), bound = make_model();
  ga::optim::AdamW our_adamw(ours->parameters(), torch::optim::AdamWOptions(1e-3));
  torch::optim::AdamW peer_adamw(peer->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto x = torch::rand({1, 8}), y = torch::randint(10, {1});
  const auto step = [&](auto& model, auto& optimizer) {
    optimizer.zero_grad();
    torch::cross_entropy_loss(model->forward(x), y).backward();
    optimizer.step();
  };
  const auto forward_and_backward = [&] {
    bound->zero_grad();
    torch::cross_entropy_loss(bound->forward(x), y).backward();
  };
  harness::contest("A training step of a tiny network, AdamW, 8-8-8-10, 1 row",
                   {{"ga::optim::AdamW", [&] { step(ours, our_adamw); }, ours->parameters()},
                    {"torch::optim::AdamW", [&] { step(peer, peer_adamw); }, peer->parameters()},
                    {.name = "bound: forward and backward alone", .run = forward_and_backward, .bound = true}},
                   1, "steps", options);
}
