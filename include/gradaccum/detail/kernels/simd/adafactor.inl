// SPDX-License-Identifier: Apache-2.0
// Computes an Adafactor step for each element, row and column. Included by kernels.ipp for each instruction set, and by
// files that compile device kernels.
//
// The update is g * scale, with scale = 1 / sqrt(estimate). A matrix's scale is the product of a row factor and a
// column factor; a vector's is computed from its variance. Row factors, and so the scales, are negative here: `larger`
// then bounds their magnitude by 1 / eps1, and NaN passes through.

/// Adds the squares of a row's gradient to the column sums and to its own sum.
template <class Vector>
struct AdafactorSquares {
  template <class G, class S>
  GRADACCUM_ON_DEVICE void operator()(const G* gradient, S* column_sums) const {
    const auto g = Vector::load(gradient) * multiplier;
    sum = multiply_add(g, g, sum);
    multiply_add(g, g, Vector::load(column_sums)).store(column_sums);
  }
  Vector multiplier;
  mutable Vector sum = Vector::all(0);
};

/// Returns the moving average of the squared gradient: of the means of row or column sums, or of a vector's elements.
template <class Vector>
struct AdafactorVariance {
  GRADACCUM_ON_DEVICE explicit AdafactorVariance(const AdafactorNumbers& by, std::int64_t count = 1)
      : multiplier(Vector::all(by.multiplier)),
        share(Vector::all(1.0 / static_cast<double>(count))),
        added(Vector::all(by.added)),
        beta2(Vector::all(by.beta2)),
        fresh2(Vector::all(by.fresh2)) {}

  template <class S>
  GRADACCUM_ON_DEVICE void operator()(S* variance, S* sums) const {
    average(variance, multiply_add(Vector::load(sums), share, added));
  }
  template <class G, class S>
  GRADACCUM_ON_DEVICE void operator()(S* variance, const G* gradient) const {
    const auto g = Vector::load(gradient) * multiplier;
    average(variance, multiply_add(g, g, added));
  }
  template <class S>
  GRADACCUM_ON_DEVICE void average(S* variance, const Vector& fresh) const {
    multiply_add(Vector::load(variance), beta2, fresh * fresh2).store(variance);
  }
  Vector multiplier, share, added, beta2, fresh2;
};

template <class Vector>
struct AdafactorFactor {
  template <class S>
  GRADACCUM_ON_DEVICE void operator()(const S* variance, S* factor) const {
    (numerator / square_root(Vector::load(variance))).store(factor);
  }
  Vector numerator;
};

/// Returns the scale of an update: from a row's factor and column factors, or from a vector's variance.
template <class Vector, bool factored>
struct AdafactorScale {
  template <class S>
  GRADACCUM_ON_DEVICE Vector operator()(const S* of) const {
    const auto x = Vector::load(of);
    if constexpr (factored) return larger(lowest, row * x);
    return larger(lowest, row / square_root(x));
  }
  Vector row, lowest;
};

/// Returns the scaled gradient, which is negative because scales are.
template <class Vector, bool factored>
struct AdafactorUpdate {
  GRADACCUM_ON_DEVICE explicit AdafactorUpdate(const AdafactorNumbers& by, double row = -1)
      : scale{Vector::all(row), Vector::all(-by.largest_scale)}, multiplier(Vector::all(by.multiplier)) {}

  template <class G, class S>
  GRADACCUM_ON_DEVICE Vector operator()(const G* gradient, const S* of) const {
    return Vector::load(gradient) * multiplier * scale(of);
  }
  AdafactorScale<Vector, factored> scale;
  Vector multiplier;
};

/// Updates a parameter. Adds no product with a plain `+`, which a compiler might or might not contract.
template <class Vector, bool factored>
struct AdafactorApply {
  GRADACCUM_ON_DEVICE explicit AdafactorApply(const AdafactorNumbers& by)
      : update(by),
        kept(Vector::all(by.kept)),
        step_size(Vector::all(by.step_size)),
        negative_beta1(Vector::all(-by.beta1)),
        fresh1(Vector::all((1 - by.beta1) * by.step_size)) {}

  template <class P, class G, class S>
  GRADACCUM_ON_DEVICE void operator()(P* parameter, const G* gradient, const S* of, S* exp_avg) const {
    const auto p = Vector::load(parameter), step = update(gradient, of);
    if (!exp_avg) return multiply_add(step, step_size, p * kept).store(parameter);
    const auto negative_average = multiply_add(Vector::load(exp_avg), negative_beta1, step * fresh1);
    (Vector::all(0) - negative_average).store(exp_avg);
    multiply_add(p, kept, negative_average).store(parameter);
  }
  AdafactorUpdate<Vector, factored> update;
  Vector kept, step_size, negative_beta1, fresh1;
};
