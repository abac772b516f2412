// SPDX-License-Identifier: Apache-2.0
//
// Vectors for processors with AVX2, FMA and F16C. Included only by kernels.ipp. Functions are free, since g++ would
// compile friends defined in the class for the program's instruction set.

struct Floats {
  using Scalar = float;
  static constexpr int width = 8;

  static Floats all(double x) { return {_mm256_set1_ps(static_cast<float>(x))}; }
  static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Floats load(const at::BFloat16* from) {
    const auto bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static Floats load(const at::Half* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  void store(float* to) const { _mm256_storeu_ps(to, v); }
  /// Rounds to nearest, ties to even.
  void store(at::BFloat16* to) const {
    const auto bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    const auto odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const auto nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const auto is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const auto rounded = _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), is_nan);
    const auto upper = _mm256_srli_epi32(rounded, 16);
    const auto packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  void store(at::Half* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  __m256 v;
};

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats square_root(Floats a) { return {_mm256_sqrt_ps(a.v)}; }
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }

struct Doubles {
  using Scalar = double;
  static constexpr int width = 4;

  static Doubles all(double x) { return {_mm256_set1_pd(x)}; }
  static Doubles load(const double* from) { return {_mm256_loadu_pd(from)}; }
  static Doubles load(const float* from) { return {_mm256_cvtps_pd(_mm_loadu_ps(from))}; }
  static Doubles load(const at::BFloat16* from) {
    const auto bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16)))};
  }
  static Doubles load(const at::Half* from) {
    return {_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))))};
  }
  void store(double* to) const { _mm256_storeu_pd(to, v); }
  double sum() const {
    double numbers[width];
    store(numbers);
    return (numbers[0] + numbers[1]) + (numbers[2] + numbers[3]);
  }

  __m256d v;
};

inline Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.v, b.v)}; }
inline Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.v, b.v)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.v, b.v)}; }
inline Doubles operator/(Doubles a, Doubles b) { return {_mm256_div_pd(a.v, b.v)}; }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
inline Doubles square_root(Doubles a) { return {_mm256_sqrt_pd(a.v)}; }
inline Doubles larger(Doubles a, Doubles b) { return {_mm256_max_pd(a.v, b.v)}; }

/// A vector of 32-bit integers, with the length of Floats.
struct Ints {
  static Ints all(int x) { return {_mm256_set1_epi32(x)}; }
  static Ints load(const std::uint8_t* from) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))};
  }
  void store(std::uint8_t* to) const {
    const auto halves = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }

  __m256i v;
};

inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.v, b.v)}; }
inline Ints truncated(Floats a) { return {_mm256_cvttps_epi32(a.v)}; }
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Ints bits_of(Floats a) { return {_mm256_castps_si256(a.v)}; }
inline Ints exponent_of(Floats a) { return {_mm256_srli_epi32(bits_of(a).v, 23)}; }
inline Floats rounded_down(Floats a) { return {_mm256_floor_ps(a.v)}; }
inline Floats magnitude(Floats a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Floats times_sign_of(Floats a, Floats sign) {
  return {_mm256_xor_ps(a.v, _mm256_and_ps(sign.v, _mm256_set1_ps(-0.0f)))};
}
/// Returns 1, -1, or `a` if that is 0 or NaN.
inline Floats sign(Floats a) {
  const auto is_other = _mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_EQ_UQ);
  return {_mm256_blendv_ps(times_sign_of(Floats::all(1), a).v, a.v, is_other)};
}
inline Doubles sign(Doubles a) {
  const auto is_other = _mm256_cmp_pd(a.v, _mm256_setzero_pd(), _CMP_EQ_UQ);
  const auto one = _mm256_or_pd(_mm256_and_pd(a.v, _mm256_set1_pd(-0.0)), _mm256_set1_pd(1));
  return {_mm256_blendv_pd(one, a.v, is_other)};
}
/// Returns 0 in lanes where `k` is 0.
inline Floats only_where(Ints k, Floats a) {
  return {_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(k.v, _mm256_setzero_si256())), a.v)};
}
inline Ints plus_one_where_less(Ints n, Floats a, Floats b) {
  return {_mm256_sub_epi32(n.v, _mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)))};
}
inline Floats plus_one_where_less(Floats n, Floats a, Floats b) {
  return {_mm256_add_ps(n.v, _mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ), _mm256_set1_ps(1)))};
}

/// A table of 16 numbers, indexed by the low four bits.
struct Table {
  explicit Table(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
  Floats operator[](Ints index) const {
    const auto upper_half = _mm256_castsi256_ps(_mm256_slli_epi32(index.v, 28));  // moves bit 3 into the sign
    return {
        _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index.v), _mm256_permutevar8x32_ps(high, index.v), upper_half)};
  }

  __m256 low, high;
};
