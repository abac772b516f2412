// SPDX-License-Identifier: Apache-2.0
//
// One step of SGD in one pass. Included by kernels.ipp for each instruction set.

template <class Vector>
struct SgdVectors {
  GRADACCUM_ON_DEVICE explicit SgdVectors(const SgdNumbers& by)
      : multiplier(Vector::all(by.multiplier)),
        decay(Vector::all(by.weight_decay)),
        momentum(Vector::all(by.momentum)),
        fresh(Vector::all(by.fresh)),
        rate(Vector::all(-by.lr)),
        decays(by.weight_decay != 0),
        nesterov(by.nesterov),
        first(by.first) {}

  template <class P, class G, class S>
  GRADACCUM_ON_DEVICE void operator()(P* parameter, const G* gradient, S* momentum_buffer) const {
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
GRADACCUM_ON_DEVICE void sgd(const SgdOperand& o, std::int64_t from, std::int64_t count) {
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  for_each_vector<Vector::width>(SgdVectors<Vector>(o.numbers), count, static_cast<P*>(o.parameter) + from,
                                 static_cast<const G*>(o.gradient) + from,
                                 o.momentum_buffer ? static_cast<S*>(o.momentum_buffer) + from : nullptr);
}

/// Steps bfloat16 parameters, which are rounded stochastically.
template <class G>
GRADACCUM_ON_DEVICE void sgd_rounded(const SgdOperand& o, std::int64_t from, std::int64_t count) {
  const SgdVectors<Floats> step(o.numbers);
  for (const auto end = from + count; from < end; from += RoundedChunk::size) {
    const auto size = RoundedChunk::part_of(end - from);
    RoundedChunk parameter(static_cast<at::BFloat16*>(o.parameter), from, size, o.rounding_key);
    for_each_vector<Floats::width>(step, size, parameter.floats(), static_cast<const G*>(o.gradient) + from,
                                   o.momentum_buffer ? static_cast<float*>(o.momentum_buffer) + from : nullptr);
  }
}

template <class P, class G, bool rounded>
struct SgdOfTypes {
  GRADACCUM_ON_DEVICE static void run(const SgdOperand& o, std::int64_t from, std::int64_t count) {
    if constexpr (rounded)
      sgd_rounded<G>(o, from, count);
    else
      sgd<P, G>(o, from, count);
  }
};
