// SPDX-License-Identifier: Apache-2.0
//
// Vectors for processors of Arm, with AVX2's results: each is as long, and a product and its sum are rounded once.
// Included only by kernels.ipp.

#include <gradaccum/detail/kernels/simd/registers.inl>
inline constexpr int float_parts = 2, double_parts = 2;

inline Float4 product_plus(const Float4& a, const Float4& b, const Float4& c) {
  return (Float4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Double2 product_plus(const Double2& a, const Double2& b, const Double2& c) {
  return (Double2)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}

// files that use those above:
#include <gradaccum/detail/kernels/simd/lanes.inl>
