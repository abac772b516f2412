// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any processor, and with one lane for a device's thread: arrays that a compiler may keep in registers. The
// including file defines the number of lanes, and `product_plus`, which determines the rounding.

template <class Number, int lanes>
struct Lanes {
  using Scalar = Number;
  static constexpr int width = lanes;

  GRADACCUM_ON_DEVICE static Lanes all(double x) {
    Lanes result;
    for (auto& number : result.numbers) number = static_cast<Scalar>(x);
    return result;
  }
  template <class T>
  GRADACCUM_ON_DEVICE static Lanes load(const T* from) {
    Lanes result;
    for (int i = 0; i < width; ++i) result.numbers[i] = static_cast<Scalar>(from[i]);
    return result;
  }
  template <class T>
  GRADACCUM_ON_DEVICE void store(T* to) const {
    for (int i = 0; i < width; ++i) to[i] = static_cast<T>(numbers[i]);
  }
  GRADACCUM_ON_DEVICE Scalar sum() const {
    Scalar total = 0;
    for (auto number : numbers) total += number;
    return total;
  }

  GRADACCUM_ON_DEVICE friend Lanes operator+(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x += y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator-(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x -= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator*(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x *= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes operator/(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x /= y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes multiply_add(Lanes a, const Lanes& b, const Lanes& c) {
    for (int i = 0; i < width; ++i) a.numbers[i] = product_plus(a.numbers[i], b.numbers[i], c.numbers[i]);
    return a;
  }
  GRADACCUM_ON_DEVICE friend Lanes square_root(Lanes a) {
    return each(a, a, [](auto& x, auto) { x = std::sqrt(x); });
  }
  /// Returns `b` if either is NaN, like the processors' instructions.
  GRADACCUM_ON_DEVICE friend Lanes larger(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x = x > y ? x : y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes smaller(Lanes a, const Lanes& b) {
    return each(a, b, [](auto& x, auto y) { x = x < y ? x : y; });
  }
  GRADACCUM_ON_DEVICE friend Lanes magnitude(Lanes a) {
    return each(a, a, [](auto& x, auto) { x = std::abs(x); });
  }
  GRADACCUM_ON_DEVICE friend Lanes rounded_down(Lanes a) {
    return each(a, a, [](auto& x, auto) { x = std::floor(x); });
  }
  GRADACCUM_ON_DEVICE friend Lanes times_sign_of(Lanes a, const Lanes& sign) {
    return each(a, sign, [](auto& x, auto s) { x = std::signbit(s) ? -x : x; });
  }

  Scalar numbers[width];

 private:
  template <class Change>
  GRADACCUM_ON_DEVICE static Lanes each(Lanes a, const Lanes& b, Change change) {
    for (int i = 0; i < width; ++i) change(a.numbers[i], b.numbers[i]);
    return a;
  }
};

using Floats = Lanes<float, lanes_of_vectors>;
using Doubles = Lanes<double, lanes_of_vectors>;
using Ints = Lanes<std::int32_t, lanes_of_vectors>;

GRADACCUM_ON_DEVICE inline Ints bits_of(const Floats& a) {
  Ints bits;
  std::memcpy(bits.numbers, a.numbers, sizeof(bits.numbers));
  return bits;
}
/// Rounds towards 0. NaN and numbers beyond 32 bits become the smallest integer, as with the processors' instructions;
/// bits are compared, because with -ffast-math a comparison with NaN may give either result.
GRADACCUM_ON_DEVICE inline Ints truncated(const Floats& a) {
  constexpr std::int32_t bits_of_2_to_31 = 0x4f000000;
  auto result = bits_of(a);
  for (int i = 0; i < Ints::width; ++i)
    result.numbers[i] = (result.numbers[i] & 0x7fffffff) < bits_of_2_to_31 ? static_cast<std::int32_t>(a.numbers[i])
                                                                           : std::numeric_limits<std::int32_t>::min();
  return result;
}
GRADACCUM_ON_DEVICE inline Floats to_floats(const Ints& a) { return Floats::load(a.numbers); }
GRADACCUM_ON_DEVICE inline Ints exponent_of(const Floats& a) {
  auto result = bits_of(a);
  for (auto& number : result.numbers) number = static_cast<std::int32_t>(static_cast<std::uint32_t>(number) >> 23);
  return result;
}
/// Returns 0 in lanes where `k` is 0.
GRADACCUM_ON_DEVICE inline Floats only_where(const Ints& k, Floats a) {
  for (int i = 0; i < Ints::width; ++i) a.numbers[i] = k.numbers[i] == 0 ? 0 : a.numbers[i];
  return a;
}
template <class Numbers>
GRADACCUM_ON_DEVICE Numbers plus_one_where_less(Numbers n, const Floats& a, const Floats& b) {
  for (int i = 0; i < Numbers::width; ++i) n.numbers[i] += a.numbers[i] < b.numbers[i];
  return n;
}

/// A table of 16 numbers, indexed by the low four bits.
struct Table {
  GRADACCUM_ON_DEVICE explicit Table(const float* from) : numbers(from) {}
  GRADACCUM_ON_DEVICE Floats operator[](const Ints& index) const {
    Floats result;
    for (int i = 0; i < Floats::width; ++i) result.numbers[i] = numbers[index.numbers[i] & 15];
    return result;
  }

  const float* numbers;
};
