// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_tensor.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <vector>

namespace gradaccum::detail {

class Moves;

/// On the CPU, all in a few parallel passes; some at a time where many parameters have to be copied first.
void take_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);
/// By kernels of our own where there are any, else by ATen. Waits for nothing: what is known on the device alone stays
/// there.
void add_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);
/// By ATen's operations. All have elements.
void add_aten_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adafactor_step.ipp>
#endif
