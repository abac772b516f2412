// SPDX-License-Identifier: Apache-2.0
//
// Registers of 16 bytes, which every 64-bit processor has, as parts of vectors, by the vector extensions of g++ and
// clang. Included before lanes.inl, which has the same functions for parts that are single numbers.

typedef float Float4 __attribute__((vector_size(16)));
typedef double Double2 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::uint32_t Uint4 __attribute__((vector_size(16)));
using FloatPart = Float4;
using IntPart = Int4;
using DoublePart = Double2;
typedef float Float2 __attribute__((vector_size(8)));
typedef std::uint16_t Short4 __attribute__((vector_size(8)));
typedef std::uint8_t Byte4 __attribute__((vector_size(4)));

template <class Vector, class T>
Vector read_vector(const T* from) {
  Vector result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}
template <class Vector, class T>
void write_vector(const Vector& from, T* to) {
  std::memcpy(static_cast<void*>(to), &from, sizeof(from));
}

inline void load_part(Float4& to, const float* from) { to = read_vector<Float4>(from); }
inline void load_part(Float4& to, const at::BFloat16* from) {
  to = (Float4)(__builtin_convertvector(read_vector<Short4>(from), Uint4) << 16);
}
inline void load_part(Int4& to, const std::uint8_t* from) {
  to = __builtin_convertvector(read_vector<Byte4>(from), Int4);
}
inline void load_part(Double2& to, const double* from) { to = read_vector<Double2>(from); }
inline void load_part(Double2& to, const float* from) {
  to = __builtin_convertvector(read_vector<Float2>(from), Double2);
}
template <class Narrow>
void load_part(Double2& to, const Narrow* from) {
  for (int i = 0; i < 2; ++i) to[i] = static_cast<double>(static_cast<float>(from[i]));
}

inline void store_part(const Float4& from, float* to) { write_vector(from, to); }
/// Rounds to nearest, ties to even. Finds NaN by its bits, since with -ffast-math a comparison may miss it.
inline void store_part(const Float4& from, at::BFloat16* to) {
  const auto bits = (Uint4)from;
  const Uint4 nearest = bits + ((bits >> 16) & 1u) + 0x7fffu;
  const auto is_nan = (Uint4)((bits & 0x7fffffffu) > 0x7f800000u);
  write_vector(__builtin_convertvector(((nearest & ~is_nan) | (0x7fc00000u & is_nan)) >> 16, Short4), to);
}
inline void store_part(const Int4& from, std::int32_t* to) { write_vector(from, to); }
inline void store_part(const Int4& from, std::uint8_t* to) { write_vector(__builtin_convertvector(from, Byte4), to); }
inline void store_part(const Double2& from, double* to) { write_vector(from, to); }

#ifdef __aarch64__  // where at::Half is made of the compiler's own type
typedef __fp16 Half4 __attribute__((vector_size(8)));
inline void load_part(Float4& to, const at::Half* from) {
  to = __builtin_convertvector(read_vector<Half4>(from), Float4);
}
inline void store_part(const Float4& from, at::Half* to) { write_vector(__builtin_convertvector(from, Half4), to); }
inline void store_part(const float& from, at::Half* to) { *to = static_cast<__fp16>(from); }
#else
inline void load_part(Float4& to, const at::Half* from) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<float>(from[i]);
}
inline void store_part(const Float4& from, at::Half* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<at::Half>(from[i]);
}
#endif

template <class Vector>
requires(!std::is_arithmetic_v<Vector>) void fill_part(Vector& part, double x) {
  for (std::size_t i = 0; i < sizeof(part) / sizeof(part[0]); ++i) part[i] = static_cast<decltype(part[0] + 0)>(x);
}

// Without these instructions compilers call std::sqrt, which may set errno, for each number.
#if defined(__SSE2__)
inline Float4 root_of(const Float4& a) { return (Float4)_mm_sqrt_ps((__m128)a); }
inline Double2 root_of(const Double2& a) { return (Double2)_mm_sqrt_pd((__m128d)a); }
#elif defined(__aarch64__)
inline Float4 root_of(const Float4& a) { return (Float4)vsqrtq_f32((float32x4_t)a); }
inline Double2 root_of(const Double2& a) { return (Double2)vsqrtq_f64((float64x2_t)a); }
#else
template <class Vector>
requires(!std::is_arithmetic_v<Vector>) Vector root_of(Vector a) {
  for (std::size_t i = 0; i < sizeof(a) / sizeof(a[0]); ++i) a[i] = std::sqrt(a[i]);
  return a;
}
#endif

/// Returns `a` in the lanes whose mask has all bits, else `b`.
template <class Vector, class Mask>
Vector chosen(const Mask& mask, const Vector& a, const Vector& b) {
  return (Vector)(((Mask)a & mask) | ((Mask)b & ~mask));
}
template <class Vector>
requires(!std::is_arithmetic_v<Vector>) Vector larger_of(const Vector& a, const Vector& b) {
  return chosen(a > b, a, b);
}
template <class Vector>
requires(!std::is_arithmetic_v<Vector>) Vector smaller_of(const Vector& a, const Vector& b) {
  return chosen(a < b, a, b);
}
template <class Vector>
requires(!std::is_arithmetic_v<Vector>) Vector sign_of(const Vector& a) {
  const Vector zero{}, one = zero + 1;
  return chosen(a > zero, one, chosen(a < zero, zero - one, a));
}
inline Float4 magnitude_of(const Float4& a) { return (Float4)((Uint4)a & 0x7fffffffu); }
inline Double2 magnitude_of(const Double2& a) { return chosen(a < Double2{}, Double2{} - a, a); }
inline Float4 with_sign_of(const Float4& a, const Float4& sign) {
  return (Float4)((Uint4)a ^ ((Uint4)sign & 0x80000000u));
}
inline Int4 truncated_part(const Float4& a) {
  const auto fits = (Int4)((Uint4)magnitude_of(a) < 0x4f000000u);  // 2^31
  const auto number = __builtin_convertvector((Float4)((Int4)a & fits), Int4);
  return chosen(fits, number, Int4{} + std::numeric_limits<std::int32_t>::min());
}
inline Float4 floor_of(const Float4& a) {
  const auto has_fraction = (Int4)((Uint4)magnitude_of(a) < 0x4b000000u);  // 2^23
  const auto whole = __builtin_convertvector(truncated_part(a), Float4);
  const Float4 floor = whole - (Float4)((Int4)(whole > a) & (Int4)(Float4{} + 1));
  return chosen(has_fraction, with_sign_of(magnitude_of(floor), a), a);
}
inline Float4 float_part(const Int4& a) { return __builtin_convertvector(a, Float4); }
inline Int4 exponent_part(const Int4& bits) { return (Int4)((Uint4)bits >> 23); }
inline Float4 only_where_part(const Int4& k, const Float4& a) { return (Float4)((Int4)a & (Int4)(k != 0)); }
inline void add_one_where(Int4& n, const Int4& mask) { n -= mask; }
inline void add_one_where(Float4& n, const Int4& mask) { n += (Float4)(mask & (Int4)(Float4{} + 1)); }
inline Int4 is_less(const Float4& a, const Float4& b) { return (Int4)(a < b); }
