// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Version.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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
};
using AdamKernel = void (*)(const AdamOperand&, std::int64_t from, std::int64_t count);

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
};
using SgdKernel = void (*)(const SgdOperand&, std::int64_t from, std::int64_t count);

namespace portable {
#include <gradaccum/detail/simd/portable.inl>
// and for these vectors:
#include <gradaccum/detail/simd/loops.inl>
// kernels:
#include <gradaccum/detail/simd/adam.inl>
#include <gradaccum/detail/simd/sgd.inl>
#include <gradaccum/detail/simd/sum_of_squares.inl>
}  // namespace portable

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include <gradaccum/detail/simd/avx2.inl>
// and for these vectors:
#include <gradaccum/detail/simd/loops.inl>
// kernels:
#include <gradaccum/detail/simd/adam.inl>
#include <gradaccum/detail/simd/sgd.inl>
#include <gradaccum/detail/simd/sum_of_squares.inl>
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
#include <gradaccum/detail/simd/avx512.inl>
// and for these vectors:
#include <gradaccum/detail/simd/loops.inl>
// kernels:
#include <gradaccum/detail/simd/adam.inl>
#include <gradaccum/detail/simd/sgd.inl>
#include <gradaccum/detail/simd/sum_of_squares.inl>
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
inline AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient,
                              InstructionSet set = instruction_set()) {
  if (set == InstructionSet::avx512) return avx512::adam_kernel(parameter, gradient);
  return set == InstructionSet::avx2 ? avx2::adam_kernel(parameter, gradient)
                                     : portable::adam_kernel(parameter, gradient);
}
inline SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set = instruction_set()) {
  if (set == InstructionSet::avx512) return avx512::sgd_kernel(parameter, gradient);
  return set == InstructionSet::avx2 ? avx2::sgd_kernel(parameter, gradient)
                                     : portable::sgd_kernel(parameter, gradient);
}

}  // namespace gradaccum::detail
