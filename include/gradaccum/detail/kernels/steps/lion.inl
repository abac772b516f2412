// SPDX-License-Identifier: Apache-2.0
//
// Lion: its settings, and its arithmetic.
#ifndef GRADACCUM_ARITHMETIC

namespace gradaccum::optim {

struct LionStep {
  static constexpr const char* state[] = {"exp_avg"};

  double lr = 0, beta1 = 0, beta2 = 0, weight_decay = 0;

  bool operator==(const LionStep&) const = default;
  bool changes_zeros() const { return lr * weight_decay != 0; }
};

}  // namespace gradaccum::optim

#else

template <class Vector>
struct Arithmetic<optim::LionStep, Vector> {
  GRADACCUM_ON_DEVICE explicit Arithmetic(const optim::LionStep& by)
      : beta1(Vector::all(by.beta1)),
        fresh1(Vector::all(1 - by.beta1)),
        beta2(Vector::all(by.beta2)),
        fresh2(Vector::all(1 - by.beta2)),
        kept(Vector::all(one_minus_product(by.lr, by.weight_decay))),
        minus_lr(Vector::all(-by.lr)) {}

  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector g, Vector& m) const {
    p = multiply_add(p, kept, sign(multiply_add(m, beta1, g * fresh1)) * minus_lr);
    m = multiply_add(m, beta2, g * fresh2);
  }

  Vector beta1, fresh1, beta2, fresh2, kept, minus_lr;
};

#endif
