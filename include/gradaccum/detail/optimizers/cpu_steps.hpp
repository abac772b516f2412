// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <vector>

namespace gradaccum::detail {

/// Runs the steps of parameters on the CPU in one parallel loop that reads and writes each element once (Adafactor a
/// few times), or in several loops if many parameters must be copied first. Leaves out steps on devices.
template <class Step>
void step_on_cpu(const std::vector<Step>& steps, double multiplier);
void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/cpu_steps.ipp>
#endif
