// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <vector>

namespace testing {

/// What an optimizer does with parameters on a device; also where there is none, since ATen's operations run anywhere.
template <class Step>
void step_on_device(const std::vector<Step>& steps, const gradaccum::detail::Multiplier& multiplier) {
  gradaccum::detail::StepPlan plan;
  plan_steps(plan, steps, multiplier);
  plan.allocate();
  plan.run();
}

}  // namespace testing
