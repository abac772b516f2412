// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <cstdint>
#include <vector>

namespace testing {

/// Returns the instruction sets that this processor has, up to the best.
inline std::vector<gradaccum::detail::InstructionSet> instruction_sets() {
  using gradaccum::detail::InstructionSet;
  std::vector<InstructionSet> all{InstructionSet::portable};
  const auto best = gradaccum::detail::instruction_set();
  if (best == InstructionSet::avx512) all.push_back(InstructionSet::avx2);
  if (best != InstructionSet::portable) all.push_back(best);
  return all;
}

/// Runs a step's kernel of an instruction set on elements [from, from + count).
inline void run_kernel(gradaccum::detail::InstructionSet set, const gradaccum::detail::AnyStep& step,
                       const gradaccum::detail::OperandTypes& types, gradaccum::detail::Operand operand,
                       std::int64_t count, std::int64_t from = 0) {
  operand.numbers = step.numbers();
  step.kind->kernel(types, set)(operand, from, count);
}

}  // namespace testing
