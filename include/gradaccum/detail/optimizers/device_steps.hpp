// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <vector>

namespace gradaccum::detail {

/// Adds steps by this library's kernels if they support the dtypes, else by ATen. Throws for steps that ATen lacks,
/// with the name of the optimizer's class. Does not synchronize.
template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/device_steps.ipp>
#endif
