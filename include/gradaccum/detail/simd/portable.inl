// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any processor: arrays that a compiler may keep in registers. Included by kernels.hpp alone.

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
