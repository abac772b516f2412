// SPDX-License-Identifier: Apache-2.0
// Runs the passes of an Adafactor step on a processor. Included by kernels.inl.

/// The most numbers that are summed in float32; longer sums add up several such sums in float64.
constexpr std::int64_t adafactor_run = 4096;

template <class Vector>
double adafactor_sum(const Vector& vector, std::int64_t count = Vector::width) {
  typename Vector::Scalar numbers[Vector::width];
  vector.store(numbers);
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(numbers[i]);
  return sum;
}

template <class Vector>
struct AdafactorAdd {
  template <class S>
  void operator()(S* sums, const S* more) const {
    (Vector::load(sums) + Vector::load(more)).store(sums);
  }
};

/// Sums the squares of rows [from, to) of all matrices; column sums go to the `part`-th set.
template <class Vector, class G>
void adafactor_sums(const AdafactorOperand& o, std::int64_t from, std::int64_t to, std::int64_t part) {
  using S = typename Vector::Scalar;
  const AdafactorSquares<Vector> squares{Vector::all(o.numbers.multiplier)};
  for (auto row = from; row < to; ++row) {
    const auto* const gradient = static_cast<const G*>(o.gradient) + row * o.columns;
    auto* const sums = static_cast<S*>(o.column_factors) + (part * o.matrices + row / o.rows) * o.columns;
    double sum = 0;
    for (std::int64_t i = 0; i < o.columns; i += adafactor_run) {
      squares.sum = Vector::all(0);
      for_each_vector<Vector::width>(squares, std::min(adafactor_run, o.columns - i), gradient + i, sums + i);
      sum += adafactor_sum(squares.sum);
    }
    static_cast<S*>(o.row_factors)[row] = static_cast<S>(sum);
  }
}

/// Updates a matrix's averages from its sums, and computes its factors.
template <class Vector>
void adafactor_factors(const AdafactorOperand& o, std::int64_t matrix) {
  using S = typename Vector::Scalar;
  auto* const row_var = static_cast<S*>(o.row_var) + matrix * o.rows;
  auto* const col_var = static_cast<S*>(o.col_var) + matrix * o.columns;
  auto* const rows = static_cast<S*>(o.row_factors) + matrix * o.rows;
  auto* const columns = static_cast<S*>(o.column_factors) + matrix * o.columns;
  for (std::int64_t part = 1; part < o.parts; ++part)
    for_each_vector<Vector::width>(AdafactorAdd<Vector>(), o.columns, columns,
                                   static_cast<const S*>(columns) + part * o.matrices * o.columns);
  for_each_vector<Vector::width>(AdafactorVariance<Vector>(o.numbers, o.columns), o.rows, row_var, rows);
  for_each_vector<Vector::width>(AdafactorVariance<Vector>(o.numbers, o.rows), o.columns, col_var, columns);
  double mean = 0;
  for (std::int64_t i = 0; i < o.rows; ++i) mean += static_cast<double>(row_var[i]);
  mean /= static_cast<double>(o.rows);
  mean = mean < o.numbers.least_mean ? o.numbers.least_mean : mean;
  for_each_vector<Vector::width>(AdafactorFactor<Vector>{Vector::all(-std::sqrt(mean))}, o.rows,
                                 static_cast<const S*>(row_var), rows);
  for_each_vector<Vector::width>(AdafactorFactor<Vector>{Vector::all(1)}, o.columns, static_cast<const S*>(col_var),
                                 columns);
}

/// Returns the sum of the squares of an update. Excludes the padding of the last vector, which may be 0 * infinity.
template <class Vector, bool factored, class G, class S>
[[gnu::flatten]] double adafactor_squares(const AdafactorUpdate<Vector, factored>& update, const G* gradient,
                                          const S* of, std::int64_t count) {
  constexpr int width = Vector::width;
  auto sum = Vector::all(0);
  std::int64_t i = 0;
  for (; i + width <= count; i += width) {
    const auto step = update(gradient + i, of + i);
    sum = multiply_add(step, step, sum);
  }
  if (i == count) return adafactor_sum(sum);
  Rest<const G, width> last_gradient(gradient + i, count - i);
  Rest<const S, width> last_of(of + i, count - i);
  const auto last = update(static_cast<const G*>(last_gradient.vector()), static_cast<const S*>(last_of.vector()));
  return adafactor_sum(sum) + adafactor_sum(last * last, count - i);
}

template <class Vector, class G>
double adafactor_update_squares(const AdafactorOperand& o, std::int64_t from, std::int64_t to) {
  using S = typename Vector::Scalar;
  AdafactorUpdate<Vector, true> update(o.numbers);
  double sum = 0;
  for (auto row = from; row < to; ++row) {
    update.row = Vector::all(static_cast<const S*>(o.row_factors)[row]);
    const auto* const gradient = static_cast<const G*>(o.gradient) + row * o.columns;
    const auto* const columns = static_cast<const S*>(o.column_factors) + row / o.rows * o.columns;
    for (std::int64_t i = 0; i < o.columns; i += adafactor_run)
      sum += adafactor_squares(update, gradient + i, columns + i, std::min(adafactor_run, o.columns - i));
  }
  return sum;
}

/// Updates the average of elements [from, to) of a vector, and returns the sum of the squares of the update.
template <class Vector, class G>
double adafactor_vector_squares(const AdafactorOperand& o, std::int64_t from, std::int64_t to) {
  using S = typename Vector::Scalar;
  const AdafactorUpdate<Vector, false> update(o.numbers);
  double sum = 0;
  for (auto i = from; i < to; i += adafactor_run) {
    const auto count = std::min(adafactor_run, to - i);
    const auto* const gradient = static_cast<const G*>(o.gradient) + i;
    auto* const variance = static_cast<S*>(o.variance) + i;
    for_each_vector<Vector::width>(AdafactorVariance<Vector>(o.numbers), count, variance, gradient);
    sum += adafactor_squares(update, gradient, static_cast<const S*>(variance), count);
  }
  return sum;
}

/// Updates rows [from, to) of all matrices, or elements [from, to) of a vector.
template <class Vector, class P, class G, bool rounded>
void adafactor_move(const AdafactorOperand& o, std::int64_t from, std::int64_t to) {
  using S = typename Vector::Scalar;
  const auto* const gradient = static_cast<const G*>(o.gradient);
  if (o.variance)
    return step_elements<Vector, P, rounded>(AdafactorApply<Vector, false>(o.numbers), o, from, to - from,
                                             gradient + from, static_cast<const S*>(o.variance) + from,
                                             elements<S>(o.exp_avg, from));
  AdafactorApply<Vector, true> apply(o.numbers);
  for (auto row = from; row < to; ++row) {
    apply.update.row = Vector::all(static_cast<const S*>(o.row_factors)[row]);
    const auto place = row * o.columns;
    const auto* const columns = static_cast<const S*>(o.column_factors) + row / o.rows * o.columns;
    step_elements<Vector, P, rounded>(apply, o, place, o.columns, gradient + place, columns,
                                      elements<S>(o.exp_avg, place));
  }
}

/// Selects kernels that compute with the vectors `F` of floats and `D` of doubles.
template <class F = Floats, class D = Doubles>
struct AdafactorIn {
  template <class P, class G, bool rounded>
  struct OfTypes {
    using Vector = std::conditional_t<std::is_same_v<P, double>, D, F>;
    static AdafactorKernels run() {
      return {adafactor_sums<Vector, G>, adafactor_factors<Vector>, adafactor_update_squares<Vector, G>,
              adafactor_vector_squares<Vector, G>, adafactor_move<Vector, P, G, rounded>};
    }
  };
};
