// SPDX-License-Identifier: Apache-2.0
//
// One step of Adam or AdamW in one pass. Included by kernels.ipp for each instruction set.

template <class Vector>
struct AdamVectors {
  GRADACCUM_ON_DEVICE explicit AdamVectors(const AdamNumbers& by)
      : multiplier(Vector::all(by.multiplier)),
        decay(Vector::all(by.weight_decay)),
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

  template <class P, class G, class S>
  GRADACCUM_ON_DEVICE void operator()(P* parameter, const G* gradient, S* exp_avg, S* exp_avg_sq,
                                      S* max_exp_avg_sq) const {
    const auto p = Vector::load(parameter), g = decayed(p, Vector::load(gradient) * multiplier);
    auto m = Vector::load(exp_avg), v = Vector::load(exp_avg_sq);
    advance(m, v, g);
    m.store(exp_avg);
    v.store(exp_avg_sq);
    if (max_exp_avg_sq) {
      v = larger(Vector::load(max_exp_avg_sq), v);
      v.store(max_exp_avg_sq);
    }
    stepped(p, m, v).store(parameter);
  }

  GRADACCUM_ON_DEVICE Vector decayed(Vector p, Vector g) const { return decays ? multiply_add(p, decay, g) : g; }
  GRADACCUM_ON_DEVICE void advance(Vector& m, Vector& v, Vector g) const {
    m = mostly_fresh ? multiply_add(m - g, beta1, g) : multiply_add(g - m, fresh1, m);  // from the nearer end
    v = multiply_add(g * fresh2, g, v * beta2);  // in this order, since g * g alone may overflow
  }
  GRADACCUM_ON_DEVICE Vector stepped(Vector p, Vector m, Vector v) const {
    return multiply_add(p, kept, (minus_step_size * m) / multiply_add(square_root(v), correction, eps));
  }

  Vector multiplier, decay, kept, beta1, fresh1, beta2, fresh2, minus_step_size, correction, eps;
  bool decays, mostly_fresh;
};

template <class P, class G>
GRADACCUM_ON_DEVICE void adam(const AdamOperand& o, std::int64_t from, std::int64_t count) {
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  for_each_vector<Vector::width>(AdamVectors<Vector>(o.numbers), count, static_cast<P*>(o.parameter) + from,
                                 static_cast<const G*>(o.gradient) + from, static_cast<S*>(o.exp_avg) + from,
                                 static_cast<S*>(o.exp_avg_sq) + from,
                                 o.max_exp_avg_sq ? static_cast<S*>(o.max_exp_avg_sq) + from : nullptr);
}

/// Steps bfloat16 parameters, which are rounded stochastically.
template <class G>
GRADACCUM_ON_DEVICE void adam_rounded(const AdamOperand& o, std::int64_t from, std::int64_t count) {
  const AdamVectors<Floats> step(o.numbers);
  for (const auto end = from + count; from < end; from += RoundedChunk::size) {
    const auto size = RoundedChunk::part_of(end - from);
    RoundedChunk parameter(static_cast<at::BFloat16*>(o.parameter), from, size, o.rounding_key);
    for_each_vector<Floats::width>(step, size, parameter.floats(), static_cast<const G*>(o.gradient) + from,
                                   static_cast<float*>(o.exp_avg) + from, static_cast<float*>(o.exp_avg_sq) + from,
                                   o.max_exp_avg_sq ? static_cast<float*>(o.max_exp_avg_sq) + from : nullptr);
  }
}

template <class P, class G, bool rounded>
struct AdamOfTypes {
  GRADACCUM_ON_DEVICE static void run(const AdamOperand& o, std::int64_t from, std::int64_t count) {
    if constexpr (rounded)
      adam_rounded<G>(o, from, count);
    else
      adam<P, G>(o, from, count);
  }
};
