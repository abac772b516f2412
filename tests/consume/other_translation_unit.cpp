// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/gradaccum.hpp>

#include <torch/torch.h>

int updates_in_other_translation_unit(at::Tensor parameter) {
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(1.0));
  gradaccum::GradAccumulator optimizer(sgd, {.steps = 1});
  (2 * parameter).sum().backward();
  optimizer.step();
  return static_cast<int>(optimizer.updates());
}
