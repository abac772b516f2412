// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_tensor.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <vector>

namespace gradaccum::detail {

class Moves;

/// Runs the steps on the CPU in a few parallel passes; in groups if many parameters have to be copied first.
void take_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen. Does not wait for the device.
void add_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's operations. No parameter may be empty.
void add_aten_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adafactor_step.ipp>
#endif
