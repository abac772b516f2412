// SPDX-License-Identifier: Apache-2.0
//
// One step of Adam or AdamW, in one pass. Included by kernels.ipp for each instruction set.

template <class Vector>
struct AdamVectors {
  explicit AdamVectors(const AdamNumbers& by)
      : multiplier(Vector::all(by.multiplier)),
        decay(Vector::all(by.weight_decay)),
        kept(Vector::all(by.kept)),
        beta1(Vector::all(by.beta1)),
        fresh1(Vector::all(by.fresh1)),
        beta2(Vector::all(by.beta2)),
        fresh2(Vector::all(by.fresh2)),
        step_size(Vector::all(by.step_size)),
        correction(Vector::all(by.correction)),
        eps(Vector::all(by.eps)),
        decays(by.weight_decay != 0),
        mostly_fresh(by.beta1 < 0.5) {}

  template <class P, class G, class S>
  void operator()(P* parameter, const G* gradient, S* exp_avg, S* exp_avg_sq, S* max_exp_avg_sq) const {
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

  Vector decayed(Vector p, Vector g) const { return decays ? multiply_add(p, decay, g) : g; }
  void advance(Vector& m, Vector& v, Vector g) const {
    m = mostly_fresh ? multiply_add(m - g, beta1, g) : multiply_add(g - m, fresh1, m);  // from the nearer end
    v = multiply_add(g * fresh2, g, v * beta2);  // in this order: the square alone may overflow
  }
  Vector stepped(Vector p, Vector m, Vector v) const {
    return p * kept - (step_size * m) / multiply_add(square_root(v), correction, eps);
  }

  Vector multiplier, decay, kept, beta1, fresh1, beta2, fresh2, step_size, correction, eps;
  bool decays, mostly_fresh;
};

template <class P, class G>
void adam(const AdamOperand& o, std::int64_t from, std::int64_t count) {
  using Vector = VectorOf<P>;
  using S = typename Vector::Scalar;
  for_each_vector<Vector::width>(AdamVectors<Vector>(o.numbers), count, static_cast<P*>(o.parameter) + from,
                                 static_cast<const G*>(o.gradient) + from, static_cast<S*>(o.exp_avg) + from,
                                 static_cast<S*>(o.exp_avg_sq) + from,
                                 o.max_exp_avg_sq ? static_cast<S*>(o.max_exp_avg_sq) + from : nullptr);
}

/// Of bfloat16 parameters that are rounded stochastically.
template <class G>
void adam_rounded(const AdamOperand& o, std::int64_t from, std::int64_t count) {
  const AdamVectors<Floats> step(o.numbers);
  for (const auto end = from + count; from < end; from += RoundedChunk::size) {
    const auto size = std::min(RoundedChunk::size, end - from);
    RoundedChunk parameter(static_cast<at::BFloat16*>(o.parameter), from, size, o.rounding_key);
    for_each_vector<Floats::width>(step, size, parameter.floats(), static_cast<const G*>(o.gradient) + from,
                                   static_cast<float*>(o.exp_avg) + from, static_cast<float*>(o.exp_avg_sq) + from,
                                   o.max_exp_avg_sq ? static_cast<float*>(o.max_exp_avg_sq) + from : nullptr);
  }
}

/// Gradients of 16-bit parameters may be float32 sums.
inline AdamKernel adam_kernel(at::ScalarType parameter, at::ScalarType gradient, bool rounded) {
  const bool same = parameter == gradient;
  if (rounded) return same ? adam_rounded<at::BFloat16> : adam_rounded<float>;
  if (parameter == at::kDouble) return adam<double, double>;
  if (parameter == at::kFloat) return adam<float, float>;
  if (parameter == at::kHalf) return same ? adam<at::Half, at::Half> : adam<at::Half, float>;
  return same ? adam<at::BFloat16, at::BFloat16> : adam<at::BFloat16, float>;
}
