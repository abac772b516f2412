// SPDX-License-Identifier: Apache-2.0
//
// Steps of single elements, in one pass. Included by kernels.inl, and by device kernels.

/// The array's elements from `from` on, null if there is no array.
template <class T>
GRADACCUM_ON_DEVICE T* elements(void* array, std::int64_t from) {
  return array ? static_cast<T*>(array) + from : nullptr;
}

/// Steps parameters [from, from + count) with `step`. `arrays` begin with the first one's gradient and state; the last
/// may be null.
template <class Vector, class P, bool rounded, class Step, class Operand, class... Arrays>
GRADACCUM_ON_DEVICE void step_elements(const Step& step, const Operand& o, std::int64_t from, std::int64_t count,
                                       Arrays*... arrays) {
  auto* const parameters = static_cast<P*>(o.parameter);
  if constexpr (!rounded) {
    for_each_vector<Vector::width>(step, count, parameters + from, arrays...);
  } else {
    for (std::int64_t i = 0; i < count; i += RoundedChunk::size) {
      const auto size = RoundedChunk::part_of(count - i);
      RoundedChunk parameter(parameters, from + i, size, o.rounding_key);
      for_each_vector<Vector::width>(step, size, parameter.floats(), (arrays ? arrays + i : nullptr)...);
    }
  }
}

/// Steps one vector of elements: loads the arguments of the arithmetic, and stores the results.
template <class Step, class Vector>
struct StepOfVector {
  GRADACCUM_ON_DEVICE explicit StepOfVector(const Operand& o)
      : arithmetic(o.numbers.as<NumbersOf<Step>>()), multiplier(Vector::all(o.multiplier)) {}

  template <class P, class G, class... S>
  GRADACCUM_ON_DEVICE void operator()(P* parameter, const G* gradient, S*... state) const {
    constexpr auto all = sizeof...(S);
    typename Vector::Scalar* const arrays[] = {state..., nullptr};
    if constexpr (is_listed<Step> && requires(const Step& by) { by.states(); })
      if (all > 0 && !arrays[all - 1]) return step(std::make_index_sequence<all - 1>(), parameter, gradient, arrays);
    step(std::make_index_sequence<all>(), parameter, gradient, arrays);
  }

  template <std::size_t... i, class P, class G, class S>
  GRADACCUM_ON_DEVICE void step(std::index_sequence<i...>, P* parameter, const G* gradient,
                                [[maybe_unused]] S* const* arrays) const {
    step_loaded(parameter, Vector::load(parameter), Vector::load(gradient) * multiplier, arrays,
                Vector::load(arrays[i])...);
  }
  template <class P, class S, class... State>
  GRADACCUM_ON_DEVICE void step_loaded(P* parameter, Vector p, Vector g, [[maybe_unused]] S* const* arrays,
                                       State... state) const {
    arithmetic(p, g, state...);
    [[maybe_unused]] int i = 0;
    (state.store(arrays[i++]), ...);
    p.store(parameter);
  }

  Arithmetic<Step, Vector> arithmetic;
  Vector multiplier;
};

/// The kernel of a step.
template <class Step>
struct ElementsOf {
  template <class P, class G, bool rounded>
  struct OfTypes {
    using Vector = VectorOf<P>;
    using S = typename Vector::Scalar;

    GRADACCUM_ON_DEVICE static void run(const Operand& o, std::int64_t from, std::int64_t count) {
      step(std::make_index_sequence<number_of_states<Step>>(), o, from, count);
    }
    template <std::size_t... i>
    GRADACCUM_ON_DEVICE static void step(std::index_sequence<i...>, const Operand& o, std::int64_t from,
                                         std::int64_t count) {
      step_elements<Vector, P, rounded>(StepOfVector<Step, Vector>(o), o, from, count,
                                        static_cast<const G*>(o.gradient) + from, state<i>(o, from)...);
    }
    /// Only the last may be null: device code has more registers if it need not ask.
    template <std::size_t i>
    GRADACCUM_ON_DEVICE static S* state(const Operand& o, std::int64_t from) {
      if constexpr (i + 1 < number_of_states<Step>) return static_cast<S*>(o.state[i]) + from;
      return elements<S>(o.state[i], from);
    }
  };
};
