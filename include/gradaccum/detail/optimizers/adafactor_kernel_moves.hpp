// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/optimizers/adafactor_tensor.hpp>
#include <gradaccum/detail/optimizers/device_operands.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <vector>

namespace gradaccum::detail {

class Moves;

// Overloads that `add_moves_by_kernels` needs for a step type.

/// Returns the operand of a step. Adafactor's kernels need row-major tensors.
DeviceOperand operand_of(const AdafactorStep& step, bool by_kernel = false);

/// Adds steps by our own kernels, in a few passes over many tensors.
void add_kernel_moves(Moves& moves, const std::vector<AdafactorStep>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels);
}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/adafactor_kernel_moves.ipp>
#endif
