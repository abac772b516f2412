// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/grad_accumulator.hpp>

#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <memory>

namespace ga = gradaccum;

struct NoOptimizer {};

int main() {
  auto parameter = at::Tensor();
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(0.1));
  torch::optim::LBFGS lbfgs({parameter});
  NoOptimizer none;
  ga::GradAccumulator inner(sgd, {.steps = 4});
  ga::GradAccumulator outer(inner, {.steps = 4});  // error: wraps an optimizer, not another accumulator
  ga::GradAccumulator copy(inner);                 // error: is neither copied nor wrapped by another
  ga::GradAccumulator closures(lbfgs);             // error: LBFGS calls its closure several times a step
  ga::GradAccumulator nothing(none);  // error: an optimizer has step\(\), zero_grad\(\) and param_groups\(\)
  std::unique_ptr<torch::optim::SGD> owned;
  ga::GradAccumulator pointer(owned);          // error: not a pointer to one: pass \*optimizer
  ga::GradAccumulator number(sgd, 4);          // error: say what the number is: \{.steps = 4\}
  ga::GradAccumulator typo(sgd, {.step = 4});  // error: step
  static_cast<void>(none), static_cast<void>(owned);
}
