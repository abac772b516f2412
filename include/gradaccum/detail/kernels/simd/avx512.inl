// SPDX-License-Identifier: Apache-2.0
//
// Vectors for processors with AVX-512 (F, BW, DQ, VL). Included only by kernels.ipp. Functions are free, since g++
// would compile friends defined in the class for the program's instruction set.

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
  /// Rounds to nearest, ties to even. The processor's own conversion would flush denormals.
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
inline Floats smaller(Floats a, Floats b) { return {_mm512_maskz_min_ps(0xffff, a.v, b.v)}; }

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

/// A vector of 32-bit integers, with the length of Floats.
struct Ints {
  static Ints all(int x) { return {_mm512_set1_epi32(x)}; }
  static Ints load(const std::uint8_t* from) {
    return {_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  void store(std::uint8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, v));
  }

  __m512i v;
};

inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints larger(Ints a, Ints b) { return {_mm512_maskz_max_epi32(0xffff, a.v, b.v)}; }
inline Ints truncated(Floats a) { return {_mm512_maskz_cvttps_epi32(0xffff, a.v)}; }
inline Floats to_floats(Ints a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.v)}; }
inline Ints bits_of(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline Ints exponent_of(Floats a) { return {_mm512_maskz_srli_epi32(0xffff, bits_of(a).v, 23)}; }
inline Floats rounded_down(Floats a) { return {_mm512_maskz_roundscale_ps(0xffff, a.v, _MM_FROUND_TO_NEG_INF)}; }
inline Floats magnitude(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats times_sign_of(Floats a, Floats sign) {
  const auto sign_bit = _mm512_set1_epi32(std::numeric_limits<int>::min());
  return {
      _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits_of(a).v, bits_of(sign).v, sign_bit, 0x78))};  // a ^ (b & c)
}
/// Returns 1, -1, or `a` if that is 0 or NaN.
inline Floats sign(Floats a) {
  const auto is_other = _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_EQ_UQ);
  return {_mm512_mask_mov_ps(times_sign_of(Floats::all(1), a).v, is_other, a.v)};
}
inline Doubles sign(Doubles a) {
  const auto is_other = _mm512_cmp_pd_mask(a.v, _mm512_setzero_pd(), _CMP_EQ_UQ);
  const auto one = _mm512_or_pd(_mm512_and_pd(a.v, _mm512_set1_pd(-0.0)), _mm512_set1_pd(1));
  return {_mm512_mask_mov_pd(one, is_other, a.v)};
}
/// Returns 0 in lanes where `k` is 0.
inline Floats only_where(Ints k, Floats a) { return {_mm512_maskz_mov_ps(_mm512_test_epi32_mask(k.v, k.v), a.v)}; }
inline Ints plus_one_where_less(Ints n, Floats a, Floats b) {
  return {_mm512_mask_add_epi32(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), n.v, _mm512_set1_epi32(1))};
}
inline Floats plus_one_where_less(Floats n, Floats a, Floats b) {
  return {_mm512_mask_add_ps(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), n.v, _mm512_set1_ps(1))};
}

/// A table of 16 numbers, indexed by the low four bits.
struct Table {
  explicit Table(const float* from) : v(_mm512_loadu_ps(from)) {}
  Floats operator[](Ints index) const { return {_mm512_maskz_permutexvar_ps(0xffff, index.v, v)}; }

  __m512 v;
};
