// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <vector>

namespace testing {

/// Runs steps of parameters on devices; those with float state on any device, because ATen's operations run on all.
template <class Step>
void step_on_device(const std::vector<Step>& steps, const gradaccum::detail::Multiplier& multiplier) {
  gradaccum::detail::StepPlan plan;
  plan_steps(plan, steps, multiplier, "step_on_device");
  plan.allocate();
  plan.run();
}

}  // namespace testing
