// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>

/// Loops over plain memory, compiled for several instruction sets in one program that may be compiled for an old
/// processor: what they are given, and which of them it is to be.
namespace gradaccum::detail {

enum class InstructionSet { portable, avx2, avx512 };

/// What this processor has, by LibTorch's own judgement; so ATEN_CPU_CAPABILITY=avx2 or =default limits it here, too.
InstructionSet instruction_set();

using SumOfSquares = double (*)(const void* numbers, std::int64_t count);
SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set = instruction_set());

/// What a step of Adam multiplies by.
struct AdamNumbers {
  double multiplier;                    ///< of the gradient: deferred scale, mean and clipping
  double weight_decay;                  ///< added to the gradient
  double kept;                          ///< of the parameter, by decoupled weight decay
  double beta1, fresh1, beta2, fresh2;  ///< fresh: 1 - beta, exact where beta is rounded
  double step_size;                     ///< lr / bias correction of the first moment
  double correction;                    ///< 1 / sqrt(bias correction of the second moment)
  double eps;
};

/// Dense memory, all in the same order. State is float32 for 16-bit parameters, else of the parameter's type.
struct AdamOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *exp_avg = nullptr, *exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  ///< of amsgrad alone
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};
using AdamKernel = void (*)(const AdamOperand&, std::int64_t from, std::int64_t count);
/// `rounded`: of bfloat16 parameters that are rounded stochastically.
AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                       bool rounded = false);

/// The same with moments of 8 bits: codes, and a scale for each block of them.
struct Adam8bitOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  std::uint8_t *exp_avg = nullptr, *exp_avg_sq = nullptr;
  float *exp_avg_scale = nullptr, *exp_avg_sq_scale = nullptr;
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};
/// `from` is a multiple of the block, and so is `count` but at the end of an array.
using Adam8bitKernel = void (*)(const Adam8bitOperand&, std::int64_t from, std::int64_t count);
Adam8bitKernel adam8bit_kernel(at::ScalarType parameter, at::ScalarType gradient,
                               InstructionSet set = instruction_set(), bool rounded = false);

/// What a step of SGD multiplies by.
struct SgdNumbers {
  double multiplier, weight_decay, momentum;
  double fresh;  ///< 1 - dampening
  double lr;
  bool nesterov, first;  ///< first: the buffer begins as the gradient
};

struct SgdOperand {
  SgdNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  ///< none without momentum
  std::uint64_t rounding_key = 0;   ///< of stochastic rounding
};
using SgdKernel = void (*)(const SgdOperand&, std::int64_t from, std::int64_t count);
SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                     bool rounded = false);

/// What a step of Adafactor multiplies by and is bounded by.
struct AdafactorNumbers {
  double multiplier;
  double beta1, beta2, fresh2;
  double added;                    ///< to the squared gradient: eps1, or 0
  double least_mean;               ///< of a matrix's row_var: 0, or eps1
  double largest_scale;            ///< of the gradient to the update: infinity, or 1 / eps1
  double kept = 1, step_size = 0;  ///< known once both sums of squares are
};

/// Matrices one after another, row-major; or a vector, which has a variance. State is of the type as in Adam.
struct AdafactorOperand {
  AdafactorNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *row_var = nullptr, *col_var = nullptr, *variance = nullptr;
  void* exp_avg = nullptr;                                 ///< none without momentum
  void *row_factors = nullptr, *column_factors = nullptr;  ///< sums of squares first; `parts` of each column's
  std::int64_t matrices = 0, rows = 0, columns = 0, parts = 0;
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};

/// The passes: see adafactor.inl.
struct AdafactorKernels {
  void (*sums)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row, std::int64_t part);
  void (*factors)(const AdafactorOperand&, std::int64_t matrix);
  double (*update_squares)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row);
  double (*vector_squares)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
  void (*move)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
};
AdafactorKernels adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient,
                                   InstructionSet set = instruction_set(), bool rounded = false);
/// Of rows so short that to fill a vector up takes longer than to go number by number.
AdafactorKernels narrow_adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient, bool rounded);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/kernels.ipp>
#endif
