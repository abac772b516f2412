// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#if defined(GRADACCUM_INLINE) || defined(GRADACCUM_ON_DEVICE) || defined(GRADACCUM_UNROLL) || defined(GRADACCUM_HOOK)
#error "gradaccum.hpp must leave no macro behind but the version's"
#endif

// The umbrella in two translation units of one program: it links, and leaves no macros behind but the version.

int updates_in_other_translation_unit(at::Tensor parameter);

TEST_CASE("two translation units link, and share one library") {
  auto parameter = torch::zeros({1}).set_requires_grad(true);
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(1.0));
  gradaccum::GradAccumulator optimizer(sgd, {.steps = 1});
  parameter.sum().backward();
  CHECK(optimizer.step());
  optimizer.zero_grad();
  CHECK(updates_in_other_translation_unit(parameter) == 1);
  CHECK(parameter.item<float>() == -3.0f);
}

TEST_CASE("version macros") {
  CHECK(GRADACCUM_VERSION_MAJOR >= 0);
  CHECK(GRADACCUM_VERSION_MINOR + GRADACCUM_VERSION_PATCH >= 0);
}
