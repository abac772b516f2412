// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/kernels.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>

#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <gradaccum/detail/kernels/on_device.hpp>

/// Each kernel is written once, in an .inl file.
namespace gradaccum::detail {

GRADACCUM_INLINE InstructionSet instruction_set() {
  static const auto found = [] {
    const auto capability = at::get_cpu_capability();
    if (capability == "AVX512") return InstructionSet::avx512;
    return capability == "AVX2" ? InstructionSet::avx2 : InstructionSet::portable;
  }();
  return found;
}

namespace portable {
inline constexpr int lanes_of_vectors = 4;
template <class Number>
Number product_plus(Number a, Number b, Number c) {
  return a * b + c;
}
#include <gradaccum/detail/kernels/simd/portable.inl>
#include <gradaccum/detail/kernels/simd/kernels.inl>
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
#include <gradaccum/detail/kernels/simd/kernels.inl>
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
#include <gradaccum/detail/kernels/simd/kernels.inl>
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else  // aliases, unused: other processors have the portable kernels only
namespace avx2 = portable;
namespace avx512 = portable;
#endif

template <class Function>
Function* of_set(InstructionSet set, Function* portable, Function* avx2, Function* avx512) {
  return set == InstructionSet::avx512 ? avx512 : set == InstructionSet::avx2 ? avx2 : portable;
}

GRADACCUM_INLINE SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set) {
  return of_set(set, portable::sum_of_squares_of, avx2::sum_of_squares_of, avx512::sum_of_squares_of)(dtype);
}
GRADACCUM_INLINE AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set,
                                        bool rounded) {
  return of_set(set, portable::adam_kernel, avx2::adam_kernel, avx512::adam_kernel)(parameter, gradient, rounded);
}
GRADACCUM_INLINE Adam8bitKernel adam8bit_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set,
                                                bool rounded) {
  return of_set(set, portable::adam8bit_kernel, avx2::adam8bit_kernel, avx512::adam8bit_kernel)(parameter, gradient,
                                                                                                rounded);
}
GRADACCUM_INLINE SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, InstructionSet set,
                                      bool rounded) {
  return of_set(set, portable::sgd_kernel, avx2::sgd_kernel, avx512::sgd_kernel)(parameter, gradient, rounded);
}
GRADACCUM_INLINE AdafactorKernels adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient,
                                                    InstructionSet set, bool rounded) {
  if (set == InstructionSet::avx512) return avx512::adafactor_kernels(parameter, gradient, rounded);
  return set == InstructionSet::avx2 ? avx2::adafactor_kernels(parameter, gradient, rounded)
                                     : portable::adafactor_kernels(parameter, gradient, rounded);
}
GRADACCUM_INLINE AdafactorKernels narrow_adafactor_kernels(at::ScalarType parameter, at::ScalarType gradient,
                                                           bool rounded) {
  using Narrow = portable::AdafactorIn<portable::Lanes<float, 1>, portable::Lanes<double, 1>>;
  return portable::of_types<AdafactorKernels(), Narrow::OfTypes>(parameter, gradient, rounded)();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
