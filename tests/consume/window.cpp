// SPDX-License-Identifier: Apache-2.0
//
// Makes three updates, the last of a shorter window, and prints the bits of the result. Each argument changes the seed.
#include <gradaccum/grad_accumulator.hpp>

#include <cstring>
#include <iostream>
#include <stdexcept>
#include <torch/torch.h>

namespace ga = gradaccum;

int main(int argc, char**) {
  torch::manual_seed(argc);
  torch::nn::Linear model(4, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 4});
  for (int i = 0; i < 10; ++i) {
    model->forward(torch::randn({8, 4})).square().mean().backward();
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.flush();
  if (optimizer.updates() != 3) throw std::runtime_error("10 micro-batches by 4 are 3 updates");
  for (int i = 0; i < 4; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, model->weight.data_ptr<float>() + i, sizeof bits);
    std::cout << bits << ' ';
  }
  std::cout << '\n';
}
