// SPDX-License-Identifier: Apache-2.0
//
// One step of SGD, in one pass. Included by kernels.ipp for each instruction set.

template <class Vector>
struct SgdVectors {
  explicit SgdVectors(const SgdNumbers& by)
      : multiplier(Vector::all(by.multiplier)),
        decay(Vector::all(by.weight_decay)),
        momentum(Vector::all(by.momentum)),
        fresh(Vector::all(by.fresh)),
        rate(Vector::all(-by.lr)),
        decays(by.weight_decay != 0),
        nesterov(by.nesterov),
        first(by.first) {}

  template <class P, class G, class S>
  void operator()(P* parameter, const G* gradient, S* momentum_buffer) const {
    auto p = Vector::load(parameter), g = Vector::load(gradient) * multiplier;
    if (decays) g = multiply_add(p, decay, g);
    if (momentum_buffer) {
      auto b = first ? g : multiply_add(Vector::load(momentum_buffer), momentum, g * fresh);
      b.store(momentum_buffer);
      g = nesterov ? multiply_add(b, momentum, g) : b;
    }
    multiply_add(g, rate, p).store(parameter);
  }

  Vector multiplier, decay, momentum, fresh, rate;
  bool decays, nesterov, first;
};

template <class P, class G>
void sgd(const SgdOperand& o, std::int64_t from, std::int64_t count) {
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  for_each_vector<Vector::width>(SgdVectors<Vector>(o.numbers), count, static_cast<P*>(o.parameter) + from,
                                 static_cast<const G*>(o.gradient) + from,
                                 o.momentum_buffer ? static_cast<S*>(o.momentum_buffer) + from : nullptr);
}

/// Of bfloat16 parameters that are rounded stochastically.
template <class G>
void sgd_rounded(const SgdOperand& o, std::int64_t from, std::int64_t count) {
  const SgdVectors<Floats> step(o.numbers);
  for (const auto end = from + count; from < end; from += RoundedChunk::size) {
    const auto size = std::min(RoundedChunk::size, end - from);
    RoundedChunk parameter(static_cast<at::BFloat16*>(o.parameter), from, size, o.rounding_key);
    for_each_vector<Floats::width>(step, size, parameter.floats(), static_cast<const G*>(o.gradient) + from,
                                   o.momentum_buffer ? static_cast<float*>(o.momentum_buffer) + from : nullptr);
  }
}

/// Gradients of 16-bit parameters may be float32 sums.
inline SgdKernel sgd_kernel(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  const bool same = parameter == gradient;
  if (rounded) return same ? sgd_rounded<at::BFloat16> : sgd_rounded<float>;
  if (parameter == at::kDouble) return sgd<double, double>;
  if (parameter == at::kFloat) return sgd<float, float>;
  if (parameter == at::kHalf) return same ? sgd<at::Half, at::Half> : sgd<at::Half, float>;
  return same ? sgd<at::BFloat16, at::BFloat16> : sgd<at::BFloat16, float>;
}
