// SPDX-License-Identifier: Apache-2.0
//
// Adafactor: its settings, and its arithmetic for each element, row and column. Its passes over a tensor are in
// simd/adafactor_passes.inl and device/adafactor.inl.
//
// The update is g * scale, with scale = 1 / sqrt(estimate). A matrix's scale is the product of a row factor and a
// column factor; a vector's is computed from its variance. Row factors, and so the scales, are negative here: `larger`
// then bounds their magnitude by 1 / eps1, and NaN passes through.
#ifndef GRADACCUM_ARITHMETIC

namespace gradaccum::detail {

struct AdafactorSettings {
  double lr;
  double step_size = 0, fresh2 = 0;  ///< of this step: lr or its replacement before scaling, and 1 - beta2
  double eps1, eps2, d, weight_decay, beta1;
  bool scale_parameter, pytorch;

  /// The inputs of `step_size` and `fresh2`, for a device that counts the steps itself, from 1.
  double step = 1, beta2_decay = 0;
  bool relative_step = false, warmup_init = false;

  bool operator==(const AdafactorSettings&) const = default;
};

/// Sets the members that depend on the step count.
GRADACCUM_ON_DEVICE inline AdafactorSettings at_step(AdafactorSettings by, double step) {
  const double most = by.warmup_init ? 1e-6 * step : by.lr, relative = 1 / std::sqrt(step);
  by.step = step;
  by.fresh2 = std::pow(step, by.beta2_decay);
  by.step_size = !by.relative_step ? by.lr : relative < most ? relative : most;
  return by;
}

/// The factors and bounds in a step of Adafactor.
struct AdafactorNumbers {
  double multiplier;
  double beta1, beta2, fresh2;
  double added;                    ///< to the squared gradient: eps1 or 0
  double least_mean;               ///< lower bound of a matrix's mean row_var: 0 or eps1
  double largest_scale;            ///< upper bound of update / gradient: infinity or 1 / eps1
  double kept = 1, step_size = 0;  ///< set once both sums of squares are known
};

GRADACCUM_ON_DEVICE inline AdafactorNumbers numbers_of(const AdafactorSettings& by, double multiplier) {
  return {.multiplier = multiplier,
          .beta1 = by.beta1,
          .beta2 = 1 - by.fresh2,
          .fresh2 = by.fresh2,
          .added = by.pytorch ? 0 : by.eps1,
          .least_mean = by.pytorch ? by.eps1 : 0,
          .largest_scale = by.pytorch ? 1 / by.eps1 : std::numeric_limits<double>::infinity()};
}

/// Returns the larger one; NaN stays NaN.
GRADACCUM_ON_DEVICE inline double at_least(double least, double x) { return x < least ? least : x; }

/// Computes a tensor's step size from the sums of the squares of the parameter, and of its update before scaling.
GRADACCUM_ON_DEVICE inline void set_step_size(AdafactorNumbers& numbers, const AdafactorSettings& by, double elements,
                                              double parameter_squares, double update_squares) {
  const double rms = std::sqrt(parameter_squares / elements), update_rms = std::sqrt(update_squares / elements);
  const double size = by.step_size * (by.scale_parameter ? at_least(by.eps2, rms) : 1);
  numbers.kept = one_minus_product(by.weight_decay, by.pytorch ? by.lr : size);
  numbers.step_size = size / at_least(1, update_rms / by.d);
}

/// Consecutive row-major matrices, or a vector, which has a `variance` instead. State is float32 for
/// 16-bit parameters, else of the parameter's type.
struct AdafactorOperand {
  AdafactorNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *row_var = nullptr, *col_var = nullptr, *variance = nullptr;
  void* exp_avg = nullptr;                                 ///< null without momentum
  void *row_factors = nullptr, *column_factors = nullptr;  ///< initially sums of squares; `parts` for each column
  std::int64_t matrices = 0, rows = 0, columns = 0, parts = 0;
  std::uint64_t rounding_key = 0;  ///< for stochastic rounding
};

/// The passes of a step; see adafactor_passes.inl.
struct AdafactorKernels {
  void (*sums)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row, std::int64_t part);
  void (*factors)(const AdafactorOperand&, std::int64_t matrix);
  double (*update_squares)(const AdafactorOperand&, std::int64_t from_row, std::int64_t to_row);
  double (*vector_squares)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
  void (*move)(const AdafactorOperand&, std::int64_t from, std::int64_t to);
};

}  // namespace gradaccum::detail

#else

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

/// The moving average of the squared gradient: of the means of row or column sums, or of a vector's elements.
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

/// The scaled gradient, negative since scales are.
template <class Vector, bool factored>
struct AdafactorUpdate {
  GRADACCUM_ON_DEVICE explicit AdafactorUpdate(const AdafactorNumbers& by)
      : row(Vector::all(-1)), lowest(Vector::all(-by.largest_scale)), multiplier(Vector::all(by.multiplier)) {}

  template <class G, class S>
  GRADACCUM_ON_DEVICE Vector operator()(const G* gradient, const S* of) const {
    return Vector::load(gradient) * multiplier * scale(of);
  }
  /// From a row's factor and column factors, or from a vector's variance.
  template <class S>
  GRADACCUM_ON_DEVICE Vector scale(const S* of) const {
    const auto x = Vector::load(of);
    if constexpr (factored) return larger(lowest, row * x);
    return larger(lowest, row / square_root(x));
  }
  Vector row, lowest, multiplier;
};

/// Updates a parameter. No plain sum takes a product, which a compiler might or might not contract.
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

#endif
