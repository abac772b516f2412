// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/gradaccum.hpp>

#include <torch/torch.h>

#if defined(GRADACCUM_INLINE) || defined(GRADACCUM_ON_DEVICE) || defined(GRADACCUM_UNROLL) || defined(GRADACCUM_HOOK)
#error "gradaccum.hpp must leave no macro behind but the version's"
#endif
static_assert(GRADACCUM_VERSION_MAJOR >= 0 && GRADACCUM_VERSION_MINOR + GRADACCUM_VERSION_PATCH >= 0);

int updates_in_umbrella(at::Tensor parameter) {
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(1.0));
  gradaccum::GradAccumulator optimizer(sgd, {.steps = 1});
  (2 * parameter).sum().backward();
  optimizer.step();
  return static_cast<int>(optimizer.updates());
}
