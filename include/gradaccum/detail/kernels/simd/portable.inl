// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any processor: arrays that a compiler may keep in registers. Included by kernels.ipp alone.

template <class Number, int lanes>
struct Lanes {
  using Scalar = Number;
  static constexpr int width = lanes;

  static Lanes all(double x) {
    Lanes result;
    for (auto& number : result.numbers) number = static_cast<Scalar>(x);
    return result;
  }
  template <class T>
  static Lanes load(const T* from) {
    Lanes result;
    for (int i = 0; i < width; ++i) result.numbers[i] = static_cast<Scalar>(from[i]);
    return result;
  }
  template <class T>
  void store(T* to) const {
    for (int i = 0; i < width; ++i) to[i] = static_cast<T>(numbers[i]);
  }
  Scalar sum() const {
    Scalar total = 0;
    for (auto number : numbers) total += number;
    return total;
  }

  friend Lanes operator+(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x += y; }); }
  friend Lanes operator-(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x -= y; }); }
  friend Lanes operator*(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x *= y; }); }
  friend Lanes operator/(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x /= y; }); }
  friend Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) { return a * b + c; }
  friend Lanes square_root(Lanes a) { return each(a, a, [](auto& x, auto) { x = std::sqrt(x); }); }
  /// `b` where one of both is NaN, as the processors' own.
  friend Lanes larger(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x = x > y ? x : y; }); }
  friend Lanes smaller(Lanes a, const Lanes& b) { return each(a, b, [](auto& x, auto y) { x = x < y ? x : y; }); }
  friend Lanes magnitude(Lanes a) { return each(a, a, [](auto& x, auto) { x = std::abs(x); }); }
  friend Lanes rounded_down(Lanes a) { return each(a, a, [](auto& x, auto) { x = std::floor(x); }); }
  friend Lanes times_sign_of(Lanes a, const Lanes& sign) {
    return each(a, sign, [](auto& x, auto s) { x = std::signbit(s) ? -x : x; });
  }

  Scalar numbers[width];

 private:
  template <class Change>
  static Lanes each(Lanes a, const Lanes& b, Change change) {
    for (int i = 0; i < width; ++i) change(a.numbers[i], b.numbers[i]);
    return a;
  }
};

using Floats = Lanes<float, 4>;
using Doubles = Lanes<double, 4>;
using Ints = Lanes<std::int32_t, 4>;

/// Towards 0; what does not fit in 32 bits is the smallest number, as the processors have it.
inline Ints truncated(const Floats& a) {
  Ints result;
  for (int i = 0; i < Ints::width; ++i)
    result.numbers[i] = std::abs(a.numbers[i]) < 2147483648.0f ? static_cast<std::int32_t>(a.numbers[i])
                                                               : std::numeric_limits<std::int32_t>::min();
  return result;
}
inline Floats to_floats(const Ints& a) { return Floats::load(a.numbers); }
inline Ints bits_of(const Floats& a) {
  Ints bits;
  std::memcpy(bits.numbers, a.numbers, sizeof(bits.numbers));
  return bits;
}
inline Ints exponent_of(const Floats& a) {
  auto result = bits_of(a);
  for (auto& number : result.numbers) number = static_cast<std::int32_t>(static_cast<std::uint32_t>(number) >> 23);
  return result;
}
/// 0 where `k` is.
inline Floats only_where(const Ints& k, Floats a) {
  for (int i = 0; i < Ints::width; ++i) a.numbers[i] = k.numbers[i] == 0 ? 0 : a.numbers[i];
  return a;
}
template <class Numbers>
Numbers plus_one_where_less(Numbers n, const Floats& a, const Floats& b) {
  for (int i = 0; i < Numbers::width; ++i) n.numbers[i] += a.numbers[i] < b.numbers[i];
  return n;
}

/// 16 numbers, looked up by the low four bits of an index.
struct Table {
  explicit Table(const float* from) { std::copy_n(from, 16, numbers); }
  Floats operator[](const Ints& index) const {
    Floats result;
    for (int i = 0; i < Floats::width; ++i) result.numbers[i] = numbers[index.numbers[i] & 15];
    return result;
  }

  float numbers[16];
};
