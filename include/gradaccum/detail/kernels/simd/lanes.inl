// SPDX-License-Identifier: Apache-2.0
//
// Vectors whose parts are registers (see registers.inl) or single numbers: one number for a device's thread. The
// including file defines the parts, and `product_plus`, which determines the rounding.

template <class T, class From>
GRADACCUM_ON_DEVICE void load_part(T& to, const From* from) {
  to = static_cast<T>(*from);
}
template <class T, class To>
GRADACCUM_ON_DEVICE void store_part(const T& from, To* to) {
  *to = static_cast<To>(from);
}
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE void fill_part(T& part, double x) { part = static_cast<T>(x); }
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE T root_of(T a) { return std::sqrt(a); }
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE T larger_of(T a, T b) { return a > b ? a : b; }
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE T smaller_of(T a, T b) { return a < b ? a : b; }
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE T magnitude_of(T a) { return std::abs(a); }
template <class T>
requires std::is_arithmetic_v<T> GRADACCUM_ON_DEVICE T sign_of(T a) { return a > 0 ? T(1) : a < 0 ? T(-1) : a; }
GRADACCUM_ON_DEVICE inline float floor_of(float a) { return std::floor(a); }
GRADACCUM_ON_DEVICE inline float with_sign_of(float a, float sign) { return std::signbit(sign) ? -a : a; }
GRADACCUM_ON_DEVICE inline std::int32_t truncated_part(float a) {
  constexpr std::int32_t bits_of_2_to_31 = 0x4f000000;
  std::int32_t bits = 0;
  std::memcpy(&bits, &a, sizeof(bits));
  return (bits & 0x7fffffff) < bits_of_2_to_31 ? static_cast<std::int32_t>(a)
                                               : std::numeric_limits<std::int32_t>::min();
}
GRADACCUM_ON_DEVICE inline float float_part(std::int32_t a) { return static_cast<float>(a); }
GRADACCUM_ON_DEVICE inline std::int32_t exponent_part(std::int32_t bits) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) >> 23);
}
GRADACCUM_ON_DEVICE inline float only_where_part(std::int32_t k, float a) { return k == 0 ? 0 : a; }
GRADACCUM_ON_DEVICE inline bool is_less(float a, float b) { return a < b; }
template <class T>
GRADACCUM_ON_DEVICE void add_one_where(T& n, bool is_true) {
  n += is_true;
}

template <class T>
struct ScalarOf {
  using type = T;
};
template <class T>
requires(!std::is_arithmetic_v<T>) struct ScalarOf<T> {
  using type = std::remove_cvref_t<decltype(std::declval<T&>()[0])>;
};

template <class Part, int count>
struct Lanes {
  using Scalar = typename ScalarOf<Part>::type;
  static constexpr int per_part = sizeof(Part) / sizeof(Scalar), width = count * per_part;

  GRADACCUM_ON_DEVICE static Lanes all(double x) {
    Lanes result;
    GRADACCUM_UNROLL
    for (auto& part : result.parts) fill_part(part, x);
    return result;
  }
  template <class T>
  GRADACCUM_ON_DEVICE static Lanes load(const T* from) {
    Lanes result;
    GRADACCUM_UNROLL
    for (int i = 0; i < count; ++i) load_part(result.parts[i], from + i * per_part);
    return result;
  }
  template <class T>
  GRADACCUM_ON_DEVICE void store(T* to) const {
    GRADACCUM_UNROLL
    for (int i = 0; i < count; ++i) store_part(parts[i], to + i * per_part);
  }
  /// Adds neighbours first, as AVX2's vectors.
  GRADACCUM_ON_DEVICE Scalar sum() const {
    Scalar numbers[width];
    store(numbers);
    for (int apart = 1; apart < width; apart *= 2)
      for (int i = 0; i + apart < width; i += 2 * apart) numbers[i] += numbers[i + apart];
    return numbers[0];
  }

  GRADACCUM_ON_DEVICE friend Lanes operator+(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x += y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator-(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x -= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator*(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x *= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator/(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x /= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes multiply_add(Lanes a, const Lanes& b, const Lanes& c) {
    GRADACCUM_UNROLL
    for (int i = 0; i < count; ++i) a.parts[i] = product_plus(a.parts[i], b.parts[i], c.parts[i]);
    return a;
  }
  GRADACCUM_ON_DEVICE friend Lanes square_root(Lanes a) {
    return each(a, a, [](auto& x, auto&) { x = root_of(x); });
  }
  /// Returns `b` if either is NaN, like the processors' instructions.
  GRADACCUM_ON_DEVICE friend Lanes larger(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x = larger_of(x, y); });
  }
  GRADACCUM_ON_DEVICE friend Lanes smaller(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto& y) { x = smaller_of(x, y); });
  }
  GRADACCUM_ON_DEVICE friend Lanes magnitude(Lanes a) {
    return each(a, a, [](auto& x, auto&) { x = magnitude_of(x); });
  }
  /// Returns 1, -1, or `a` if that is 0 or NaN.
  GRADACCUM_ON_DEVICE friend Lanes sign(Lanes a) {
    return each(a, a, [](auto& x, auto&) { x = sign_of(x); });
  }
  GRADACCUM_ON_DEVICE friend Lanes rounded_down(Lanes a) {
    return each(a, a, [](auto& x, auto&) { x = floor_of(x); });
  }
  GRADACCUM_ON_DEVICE friend Lanes times_sign_of(Lanes a, const Lanes& sign) {
    return each(a, sign, [](auto& x, auto& s) { x = with_sign_of(x, s); });
  }

  Part parts[count];

 private:
  template <class Change>
  GRADACCUM_ON_DEVICE static Lanes each(Lanes a, const Lanes& b, Change change) {
    GRADACCUM_UNROLL
    for (int i = 0; i < count; ++i) change(a.parts[i], b.parts[i]);
    return a;
  }
};

using Floats = Lanes<FloatPart, float_parts>;
using Ints = Lanes<IntPart, float_parts>;
using Doubles = Lanes<DoublePart, double_parts>;

GRADACCUM_ON_DEVICE inline Ints bits_of(const Floats& a) {
  Ints bits;
  std::memcpy(bits.parts, a.parts, sizeof(bits.parts));
  return bits;
}
/// Rounds towards 0. NaN and numbers beyond 32 bits become the smallest integer, as with the processors' instructions.
/// Checks bits, because with -ffast-math a comparison with NaN may give either result.
GRADACCUM_ON_DEVICE inline Ints truncated(const Floats& a) {
  Ints result;
  GRADACCUM_UNROLL
  for (int i = 0; i < float_parts; ++i) result.parts[i] = truncated_part(a.parts[i]);
  return result;
}
GRADACCUM_ON_DEVICE inline Floats to_floats(const Ints& a) {
  Floats result;
  GRADACCUM_UNROLL
  for (int i = 0; i < float_parts; ++i) result.parts[i] = float_part(a.parts[i]);
  return result;
}
GRADACCUM_ON_DEVICE inline Ints exponent_of(const Floats& a) {
  auto result = bits_of(a);
  GRADACCUM_UNROLL
  for (auto& part : result.parts) part = exponent_part(part);
  return result;
}
/// Returns 0 in lanes where `k` is 0.
GRADACCUM_ON_DEVICE inline Floats only_where(const Ints& k, Floats a) {
  GRADACCUM_UNROLL
  for (int i = 0; i < float_parts; ++i) a.parts[i] = only_where_part(k.parts[i], a.parts[i]);
  return a;
}
template <class Numbers>
GRADACCUM_ON_DEVICE Numbers plus_one_where_less(Numbers n, const Floats& a, const Floats& b) {
  GRADACCUM_UNROLL
  for (int i = 0; i < float_parts; ++i) add_one_where(n.parts[i], is_less(a.parts[i], b.parts[i]));
  return n;
}

/// A table of 16 numbers, indexed by the low four bits.
struct Table {
  GRADACCUM_ON_DEVICE explicit Table(const float* from) : numbers(from) {}
  GRADACCUM_ON_DEVICE Floats operator[](const Ints& index) const {
    std::int32_t indices[Ints::width];
    float found[Floats::width];
    index.store(indices);
    for (int i = 0; i < Floats::width; ++i) found[i] = numbers[indices[i] & 15];
    return Floats::load(found);
  }

  const float* numbers;
};
