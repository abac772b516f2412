// SPDX-License-Identifier: Apache-2.0
//
// SGD: its settings, and its arithmetic.
#ifndef GRADACCUM_ARITHMETIC

namespace gradaccum::detail {

struct SgdStep {
  static constexpr const char* state[] = {"momentum_buffer"};

  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, first = false;  ///< first: the momentum buffer starts as the gradient

  bool operator==(const SgdStep&) const = default;
  std::size_t states() const { return momentum != 0 ? 1 : 0; }
  bool decays_gradient() const { return weight_decay != 0; }
  bool only_adds_gradient() const { return momentum == 0 && weight_decay == 0; }
};

}  // namespace gradaccum::detail

#else

template <class Vector>
struct Arithmetic<SgdStep, Vector> {
  GRADACCUM_ON_DEVICE explicit Arithmetic(const SgdStep& by)
      : decay(Vector::all(by.weight_decay)),
        momentum(Vector::all(by.momentum)),
        fresh(Vector::all(1 - by.dampening)),
        minus_lr(Vector::all(-by.lr)),
        decays(by.weight_decay != 0),
        nesterov(by.nesterov),
        first(by.first) {}

  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector g) const { p = multiply_add(decayed(p, g), minus_lr, p); }
  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector g, Vector& b) const {
    g = decayed(p, g);
    b = first ? g : multiply_add(b, momentum, g * fresh);
    p = multiply_add(nesterov ? multiply_add(b, momentum, g) : b, minus_lr, p);
  }
  GRADACCUM_ON_DEVICE Vector decayed(Vector p, Vector g) const { return decays ? multiply_add(p, decay, g) : g; }

  Vector decay, momentum, fresh, minus_lr;
  bool decays, nesterov, first;
};

#endif
