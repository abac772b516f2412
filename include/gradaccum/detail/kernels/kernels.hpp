// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/operands.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>

/// Loops over plain memory, compiled for several instruction sets even if the program targets an old processor.
namespace gradaccum::detail {

enum class InstructionSet { portable, avx2, avx512 };

/// The best instruction set of this processor according to LibTorch, so ATEN_CPU_CAPABILITY=avx2 or =default limits it.
InstructionSet instruction_set();

using SumOfSquares = double (*)(const void* numbers, std::int64_t count);
SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set = instruction_set());

using AdamKernel = void (*)(const AdamOperand&, std::int64_t from, std::int64_t count);
/// `rounded`: rounds bfloat16 parameters stochastically.
AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                       bool rounded = false);

/// `from` is a multiple of the block size, and so is `count` except at the end of an array.
using Adam8bitKernel = void (*)(const Adam8bitOperand&, std::int64_t from, std::int64_t count);
Adam8bitKernel adam8bit_kernel(at::ScalarType parameter, at::ScalarType gradient,
                               InstructionSet set = instruction_set(), bool rounded = false);

using SgdKernel = void (*)(const SgdOperand&, std::int64_t from, std::int64_t count);
SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                     bool rounded = false);

/// The passes of a step; see adafactor_passes.inl.
struct AdafactorKernels {
  void (*sums)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row, std::int64_t part);
  void (*factors)(const AdafactorOperand&, std::int64_t matrix);
  double (*update_squares)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row);
  double (*vector_squares)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
  void (*move)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
};
AdafactorKernels adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient,
                                   InstructionSet set = instruction_set(), bool rounded = false);
/// Kernels for rows so short that padding a vector takes longer than a loop over single numbers.
AdafactorKernels narrow_adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient, bool rounded);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/kernels.ipp>
#endif
