// SPDX-License-Identifier: Apache-2.0
// Steps of SGD, and of Adam or AdamW, in one pass. Included by kernels.ipp for each instruction set, and by files that
// compile device kernels.

/// Returns the array's elements from `from` on; null if there is no array.
template <class T>
GRADACCUM_ON_DEVICE T* elements(void* array, std::int64_t from) {
  return array ? static_cast<T*>(array) + from : nullptr;
}

/// Steps parameters [from, from + count). `arrays`, and the `last` one, which may be null, begin with the first one's
/// gradient and state.
template <class Vector, class P, bool rounded, class Step, class Operand, class Last, class... Arrays>
GRADACCUM_ON_DEVICE void step_elements(const Step& step, const Operand& o, std::int64_t from, std::int64_t count,
                                       Last* last, Arrays*... arrays) {
  auto* const parameters = static_cast<P*>(o.parameter);
  if constexpr (!rounded) {
    for_each_vector<Vector::width>(step, count, parameters + from, arrays..., last);
  } else {
    for (std::int64_t i = 0; i < count; i += RoundedChunk::size) {
      const auto size = RoundedChunk::part_of(count - i);
      RoundedChunk parameter(parameters, from + i, size, o.rounding_key);
      for_each_vector<Vector::width>(step, size, parameter.floats(), (arrays + i)..., last ? last + i : nullptr);
    }
  }
}

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

template <class P, class G, bool rounded>
struct SgdOfTypes {
  GRADACCUM_ON_DEVICE static void run(const SgdOperand& o, std::int64_t from, std::int64_t count) {
    using Vector = VectorOf<P>;
    using S = typename Vector::Scalar;
    step_elements<Vector, P, rounded>(SgdVectors<Vector>(o.numbers), o, from, count,
                                      elements<S>(o.momentum_buffer, from), static_cast<const G*>(o.gradient) + from);
  }
};

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

template <class P, class G, bool rounded>
struct AdamOfTypes {
  GRADACCUM_ON_DEVICE static void run(const AdamOperand& o, std::int64_t from, std::int64_t count) {
    using Vector = VectorOf<P>;
    using S = typename Vector::Scalar;
    step_elements<Vector, P, rounded>(AdamVectors<Vector>(o.numbers), o, from, count,
                                      elements<S>(o.max_exp_avg_sq, from), static_cast<const G*>(o.gradient) + from,
                                      static_cast<S*>(o.exp_avg) + from, static_cast<S*>(o.exp_avg_sq) + from);
  }
};
