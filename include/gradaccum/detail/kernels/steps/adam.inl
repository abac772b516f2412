// SPDX-License-Identifier: Apache-2.0
//
// Adam and AdamW, with float and with 8-bit moments: their settings, and their arithmetic.
#ifndef GRADACCUM_ARITHMETIC

namespace gradaccum::detail {

/// The factors in a step of Adam.
struct AdamNumbers {
  double weight_decay;                  ///< added to the gradient
  double kept;                          ///< the parameter's factor in decoupled weight decay
  double beta1, fresh1, beta2, fresh2;  ///< fresh: 1 - beta, exact even if beta is rounded
  double step_size;                     ///< lr / bias correction of the first moment
  double correction;                    ///< 1 / sqrt(bias correction of the second moment)
  double eps;
};

struct AdamStep {
  static constexpr const char* state[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false, decoupled = false;  ///< decoupled: AdamW's weight decay
  std::int64_t step = 1;                    ///< the current step, counted from 1

  bool operator==(const AdamStep&) const = default;
  std::size_t states() const { return amsgrad ? 3 : 2; }
  bool decays_gradient() const { return !decoupled && weight_decay != 0; }
  /// An eps that is 0 or denormal in float32 turns elements without moments into NaN.
  bool changes_zeros() const {
    return (decoupled && lr * weight_decay != 0) || eps < std::numeric_limits<float>::min();
  }
  GRADACCUM_ON_DEVICE AdamNumbers numbers() const {
    const auto count = static_cast<double>(step);
    const double correction1 = 1 - std::pow(beta1, count), correction2 = 1 - std::pow(beta2, count);
    return {.weight_decay = decoupled ? 0 : weight_decay,
            .kept = decoupled ? one_minus_product(lr, weight_decay) : 1,
            .beta1 = beta1,
            .fresh1 = 1 - beta1,
            .beta2 = beta2,
            .fresh2 = 1 - beta2,
            .step_size = lr / correction1,
            .correction = 1 / std::sqrt(correction2),
            .eps = eps};
  }
};

/// Moments are 8-bit codes with one scale per block. Its kernels are in simd/adam8bit.inl and device/steps.inl.
struct Adam8bitStep : AdamStep {
  static constexpr const char* state[] = {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"};

  bool operator==(const Adam8bitStep&) const = default;
  std::size_t states() const { return 4; }
};

}  // namespace gradaccum::detail

#else

template <class Vector>
struct Arithmetic<AdamStep, Vector> {
  GRADACCUM_ON_DEVICE explicit Arithmetic(const AdamNumbers& by)
      : decay(Vector::all(by.weight_decay)),
        kept(Vector::all(by.kept)),
        beta1(Vector::all(by.beta1)),
        fresh1(Vector::all(by.fresh1)),
        beta2(Vector::all(by.beta2)),
        fresh2(Vector::all(by.fresh2)),
        minus_step_size(Vector::all(-by.step_size)),
        correction(Vector::all(by.correction)),
        eps(Vector::all(by.eps)),
        decays(by.weight_decay != 0),
        mostly_fresh(by.beta1 < 0.5) {}

  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector g, Vector& m, Vector& v) const {
    advance(m, v, decayed(p, g));
    p = stepped(p, m, v);
  }
  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector g, Vector& m, Vector& v, Vector& largest_v) const {
    advance(m, v, decayed(p, g));
    largest_v = larger(largest_v, v);
    p = stepped(p, m, largest_v);
  }

  GRADACCUM_ON_DEVICE Vector decayed(Vector p, Vector g) const { return decays ? multiply_add(p, decay, g) : g; }
  GRADACCUM_ON_DEVICE void advance(Vector& m, Vector& v, Vector g) const {
    m = mostly_fresh ? multiply_add(m - g, beta1, g) : multiply_add(g - m, fresh1, m);  // from the nearer end
    v = multiply_add(g * fresh2, g, v * beta2);  // in this order, since g * g alone may overflow
  }
  GRADACCUM_ON_DEVICE Vector stepped(Vector p, Vector m, Vector v) const {
    return multiply_add(p, kept, (minus_step_size * m) / multiply_add(square_root(v), correction, eps));
  }

  Vector decay, kept, beta1, fresh1, beta2, fresh2, minus_step_size, correction, eps;
  bool decays, mostly_fresh;
};

#endif
