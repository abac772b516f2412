// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any processor: of registers, or of single numbers for compilers without vector extensions. Included by
// kernels.ipp and own_kernels.hpp. Tests define GRADACCUM_NO_VECTOR_EXTENSIONS.

#if (defined(__GNUC__) || defined(__clang__)) && !defined(GRADACCUM_NO_VECTOR_EXTENSIONS)
#include <gradaccum/detail/kernels/simd/registers.inl>
inline constexpr int float_parts = 1, double_parts = 2;
#else
using FloatPart = float;
using IntPart = std::int32_t;
using DoublePart = double;
inline constexpr int float_parts = 4, double_parts = 4;
#endif

/// Rounds the product and the sum, on every processor. `c` may be a product, too.
template <class Number>
Number product_plus(const Number& a, const Number& b, Number c) {
  Number product = a * b;
  keep_rounded(product);
  keep_rounded(c);
  return product + c;
}

// files that use those above:
#include <gradaccum/detail/kernels/simd/lanes.inl>
