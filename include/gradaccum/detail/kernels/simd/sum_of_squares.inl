// SPDX-License-Identifier: Apache-2.0
//
// The sum of the squares of an array. Included by kernels.ipp for each instruction set.

/// In float64: the squares of finite 16- and 32-bit numbers stay finite, and millions of them lose nothing.
template <class T>
double sum_of_squares(const void* numbers, std::int64_t count) {
  constexpr int width = Doubles::width;
  const auto* const from = static_cast<const T*>(numbers);
  auto a = Doubles::all(0), b = a, c = a, d = a;  // four sums, so that none waits for another
  std::int64_t i = 0;
  for (; i + 4 * width <= count; i += 4 * width) {
    const auto p = Doubles::load(from + i), q = Doubles::load(from + i + width);
    const auto r = Doubles::load(from + i + 2 * width), s = Doubles::load(from + i + 3 * width);
    a = multiply_add(p, p, a), b = multiply_add(q, q, b), c = multiply_add(r, r, c), d = multiply_add(s, s, d);
  }
  for (; i < count; i += width) {
    Rest<const T, width> rest(from + i, std::min<std::int64_t>(width, count - i));
    const auto last = Doubles::load(rest.vector());
    a = multiply_add(last, last, a);
  }
  return ((a + b) + (c + d)).sum();
}

inline SumOfSquares sum_of_squares_of(at::ScalarType dtype) {
  if (dtype == at::kDouble) return sum_of_squares<double>;
  if (dtype == at::kFloat) return sum_of_squares<float>;
  if (dtype == at::kHalf) return sum_of_squares<at::Half>;
  return sum_of_squares<at::BFloat16>;
}
