// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dynamic_map.hpp>

#include <ATen/Version.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

/// Loops over plain memory, compiled for several instruction sets in one program that may be compiled for an old
/// processor. Each is written once, in an .inl file.
namespace gradaccum::detail {

enum class InstructionSet { portable, avx2, avx512 };

/// What this processor has, by LibTorch's own judgement; so ATEN_CPU_CAPABILITY=avx2 or =default limits it here, too.
inline InstructionSet instruction_set() {
  static const auto found = [] {
    const auto capability = at::get_cpu_capability();
    if (capability == "AVX512") return InstructionSet::avx512;
    return capability == "AVX2" ? InstructionSet::avx2 : InstructionSet::portable;
  }();
  return found;
}

using SumOfSquares = double (*)(const void* numbers, std::int64_t count);

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

namespace portable {
#include <gradaccum/detail/kernels/simd/portable.inl>
// and for these vectors:
#include <gradaccum/detail/kernels/simd/loops.inl>
#include <gradaccum/detail/kernels/simd/stochastic.inl>
// kernels:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/adam8bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>
#include <gradaccum/detail/kernels/simd/sum_of_squares.inl>
}  // namespace portable

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include <gradaccum/detail/kernels/simd/avx2.inl>
// and for these vectors:
#include <gradaccum/detail/kernels/simd/loops.inl>
#include <gradaccum/detail/kernels/simd/stochastic.inl>
// kernels:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/adam8bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>
#include <gradaccum/detail/kernels/simd/sum_of_squares.inl>
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
namespace avx512 {
#include <gradaccum/detail/kernels/simd/avx512.inl>
// and for these vectors:
#include <gradaccum/detail/kernels/simd/loops.inl>
#include <gradaccum/detail/kernels/simd/stochastic.inl>
// kernels:
#include <gradaccum/detail/kernels/simd/adafactor.inl>
#include <gradaccum/detail/kernels/simd/adam.inl>
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/adam8bit.inl>
#include <gradaccum/detail/kernels/simd/sgd.inl>
#include <gradaccum/detail/kernels/simd/sum_of_squares.inl>
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else  // the same code by other names, which are never asked for
namespace avx2 = portable;
namespace avx512 = portable;
#endif

inline SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set = instruction_set()) {
  if (set == InstructionSet::avx512) return avx512::sum_of_squares_of(dtype);
  return set == InstructionSet::avx2 ? avx2::sum_of_squares_of(dtype) : portable::sum_of_squares_of(dtype);
}
/// `rounded`: of bfloat16 parameters that are rounded stochastically.
inline AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                              bool rounded = false) {
  if (set == InstructionSet::avx512) return avx512::adam_kernel(parameter, gradient, rounded);
  return set == InstructionSet::avx2 ? avx2::adam_kernel(parameter, gradient, rounded)
                                     : portable::adam_kernel(parameter, gradient, rounded);
}
inline Adam8bitKernel adam8bit_kernel(at::ScalarType parameter, at::ScalarType gradient,
                                      InstructionSet set = instruction_set(), bool rounded = false) {
  if (set == InstructionSet::avx512) return avx512::adam8bit_kernel(parameter, gradient, rounded);
  return set == InstructionSet::avx2 ? avx2::adam8bit_kernel(parameter, gradient, rounded)
                                     : portable::adam8bit_kernel(parameter, gradient, rounded);
}
inline SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set(),
                            bool rounded = false) {
  if (set == InstructionSet::avx512) return avx512::sgd_kernel(parameter, gradient, rounded);
  return set == InstructionSet::avx2 ? avx2::sgd_kernel(parameter, gradient, rounded)
                                     : portable::sgd_kernel(parameter, gradient, rounded);
}
inline AdafactorKernels adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient,
                                          InstructionSet set = instruction_set(), bool rounded = false) {
  if (set == InstructionSet::avx512) return avx512::adafactor_kernels(parameter, gradient, rounded);
  return set == InstructionSet::avx2 ? avx2::adafactor_kernels(parameter, gradient, rounded)
                                     : portable::adafactor_kernels(parameter, gradient, rounded);
}
/// Of rows so short that to fill a vector up takes longer than to go number by number.
inline AdafactorKernels narrow_adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  return portable::adafactor_kernels<portable::Lanes<float, 1>, portable::Lanes<double, 1>>(parameter, gradient,
                                                                                            rounded);
}

}  // namespace gradaccum::detail
