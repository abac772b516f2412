// SPDX-License-Identifier: Apache-2.0
//
// Vectors for processors with AVX-512 (F, BW, DQ, VL). Included by kernels.hpp alone. Free functions: g++ would compile
// friends that are defined in the class for the instruction set of the program around.

struct Floats {
  using Scalar = float;
  static constexpr int width = 16;

  static Floats all(double x) { return {_mm512_set1_ps(static_cast<float>(x))}; }
  static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Floats load(const at::BFloat16* from) {
    const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16))};
  }
  static Floats load(const at::Half* from) {
    const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_maskz_cvtph_ps(0xffff, bits)};
  }
  void store(float* to) const { _mm512_storeu_ps(to, v); }
  /// To the nearest, ties to even. The processor's own conversion would flush denormals.
  void store(at::BFloat16* to) const {
    const auto bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    const auto odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), one);
    const auto nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const auto is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const auto rounded = _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc00000));
    const auto upper = _mm512_maskz_srli_epi32(0xffff, rounded, 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, upper));
  }
  void store(at::Half* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
  }

  __m512 v;
};

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats square_root(Floats a) { return {_mm512_maskz_sqrt_ps(0xffff, a.v)}; }
inline Floats larger(Floats a, Floats b) { return {_mm512_maskz_max_ps(0xffff, a.v, b.v)}; }

struct Doubles {
  using Scalar = double;
  static constexpr int width = 8;

  static Doubles all(double x) { return {_mm512_set1_pd(x)}; }
  static Doubles load(const double* from) { return {_mm512_loadu_pd(from)}; }
  static Doubles load(const float* from) { return wide(_mm256_loadu_ps(from)); }
  static Doubles load(const at::BFloat16* from) {
    const auto bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return wide(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  }
  static Doubles load(const at::Half* from) {
    return wide(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  void store(double* to) const { _mm512_storeu_pd(to, v); }
  double sum() const {
    alignas(64) double numbers[width];
    store(numbers);
    double total = 0;
    for (double number : numbers) total += number;
    return total;
  }

  __m512d v;

 private:
  static Doubles wide(__m256 floats) { return {_mm512_maskz_cvtps_pd(0xff, floats)}; }
};

inline Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
inline Doubles operator-(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline Doubles operator/(Doubles a, Doubles b) { return {_mm512_div_pd(a.v, b.v)}; }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
inline Doubles square_root(Doubles a) { return {_mm512_maskz_sqrt_pd(0xff, a.v)}; }
inline Doubles larger(Doubles a, Doubles b) { return {_mm512_maskz_max_pd(0xff, a.v, b.v)}; }
