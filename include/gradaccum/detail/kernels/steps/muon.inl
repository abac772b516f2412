// SPDX-License-Identifier: Apache-2.0
//
// Muon: the two passes before and after its products of matrices.
#ifndef GRADACCUM_ARITHMETIC

namespace gradaccum::optim {

/// Averages gradients, and writes the direction of the step to what takes the parameter's place.
struct MuonDirectionStep {
  static constexpr const char* state[] = {"momentum_buffer"};

  double momentum = 0;
  bool nesterov = false;

  bool operator==(const MuonDirectionStep&) const = default;
};

/// Subtracts a multiple of the orthogonal direction, which takes the gradient's place.
struct MuonUpdateStep {
  static constexpr std::array<const char*, 0> state{};

  double lr = 0, kept = 1;  ///< kept: the parameter's factor in decoupled weight decay

  bool operator==(const MuonUpdateStep&) const = default;
};

}  // namespace gradaccum::optim

#else

template <class Vector>
struct Arithmetic<optim::MuonDirectionStep, Vector> {
  GRADACCUM_ON_DEVICE explicit Arithmetic(const optim::MuonDirectionStep& by)
      : momentum(Vector::all(by.momentum)),
        fresh(Vector::all(1 - by.momentum)),
        nesterov(by.nesterov),
        mostly_fresh(by.momentum < 0.5) {}

  GRADACCUM_ON_DEVICE void operator()(Vector& direction, Vector g, Vector& b) const {
    b = between(g, b);
    direction = nesterov ? between(g, b) : b;
  }
  /// From the nearer end.
  GRADACCUM_ON_DEVICE Vector between(Vector g, Vector b) const {
    return mostly_fresh ? multiply_add(b - g, momentum, g) : multiply_add(g - b, fresh, b);
  }

  Vector momentum, fresh;
  bool nesterov, mostly_fresh;
};

template <class Vector>
struct Arithmetic<optim::MuonUpdateStep, Vector> {
  GRADACCUM_ON_DEVICE explicit Arithmetic(const optim::MuonUpdateStep& by)
      : minus_lr(Vector::all(-by.lr)), kept(Vector::all(by.kept)) {}

  GRADACCUM_ON_DEVICE void operator()(Vector& p, Vector direction) const {
    p = multiply_add(p, kept, direction * minus_lr);
  }

  Vector minus_lr, kept;
};

#endif
