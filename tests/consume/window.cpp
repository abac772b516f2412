// SPDX-License-Identifier: Apache-2.0
//
// Makes three updates, the last of a shorter window. Throws if there were not three.
#include <gradaccum/grad_accumulator.hpp>

#include <stdexcept>
#include <torch/torch.h>

namespace ga = gradaccum;

int main() {
  torch::nn::Linear model(4, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 4});
  for (int i = 0; i < 10; ++i) {
    model->forward(torch::randn({8, 4})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.flush();
  if (optimizer.updates() != 3) throw std::runtime_error("10 micro-batches by 4 are 3 updates");
}
