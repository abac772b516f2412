// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <cstdint>

namespace testing {

/// Runs a step's kernel of an instruction set on elements [from, from + count).
inline void run_kernel(gradaccum::detail::InstructionSet set, const gradaccum::detail::AnyStep& step,
                       const gradaccum::detail::OperandTypes& types, gradaccum::detail::Operand operand,
                       std::int64_t count, std::int64_t from = 0) {
  operand.numbers = step.numbers();
  step.kind->kernel(types.parameter, types.gradient, types.rounded, set)(operand, from, count);
}

}  // namespace testing
