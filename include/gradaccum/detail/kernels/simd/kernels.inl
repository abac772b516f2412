// SPDX-License-Identifier: Apache-2.0
//
// All kernels, for the vectors `Floats` and `Doubles` of the including file: kernels.ipp includes it for each
// instruction set, and own_kernels.hpp for the program. Loops over arrays take one vector at a time. No lambdas: g++
// compiles them for the program's instruction set.

#include <gradaccum/detail/kernels/simd/types.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/eight_bit.inl>

/// The last elements of an array, padded to a vector; written back on destruction.
template <class T, int width>
class Rest {
 public:
  Rest(T* array, std::int64_t count) : array_(array), bytes_(array ? static_cast<std::size_t>(count) * sizeof(T) : 0) {
    if (array) std::memcpy(elements_, array, bytes_);
  }
  ~Rest() {
    if constexpr (!std::is_const_v<T>)
      if (array_) std::memcpy(array_, elements_, bytes_);
  }
  T* vector() { return array_ ? elements_ : nullptr; }

 private:
  T* array_;
  std::size_t bytes_;
  std::remove_const_t<T> elements_[width] = {};
};

/// Calls `update` with pointers to one vector of each array at a time. A null array stays nullptr. Flattened, because
/// g++ at -O2 would call a function for each vector.
template <int width, class Update, class... T>
[[gnu::flatten]] void for_each_vector(const Update& update, std::int64_t count, T*... arrays) {
  std::int64_t i = 0;
  for (; i + width <= count; i += width) update((arrays ? arrays + i : nullptr)...);
  if (i < count) update(Rest<T, width>(arrays ? arrays + i : nullptr, count - i).vector()...);
}

/// A few numbers of a bfloat16 array as float32. On destruction they are rounded up or down at random, without bias,
/// and written back. The random bits are a hash of `key` and the number's position.
class RoundedChunk {
 public:
  static constexpr std::int64_t size = 256;
  /// The size of a chunk when `count` numbers are left.
  static std::int64_t part_of(std::int64_t count) { return std::min(size, count); }

  /// Loads `count` numbers, at most `size`, starting at `array[place]`.
  RoundedChunk(at::BFloat16* array, std::int64_t place, std::int64_t count, std::uint64_t key)
      : array_(array + place), place_(place), count_(count), key_(key) {
    std::int64_t i = 0;
    for (; i + Floats::width <= count; i += Floats::width) Floats::load(array_ + i).store(floats_ + i);
    for (; i < count; ++i) floats_[i] = static_cast<float>(array_[i]);
  }
  RoundedChunk(const RoundedChunk&) = delete;
  ~RoundedChunk() {
    at::BFloat16 rounded[size];
    for (std::int64_t i = 0; i < count_; i += lanes) round(floats_ + i, place_ + i, rounded + i);
    std::memcpy(static_cast<void*>(array_), rounded, static_cast<std::size_t>(count_) * sizeof(at::BFloat16));
  }

  float* floats() { return floats_; }

 private:
#if (defined(__GNUC__) || defined(__clang__)) && !defined(GRADACCUM_NO_VECTOR_EXTENSIONS)
  // Vectors of the compiler, each mapped to one or several of the processor's.
  static constexpr int lanes = 16;
  typedef std::uint32_t Bits __attribute__((vector_size(4 * lanes)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * lanes)));

  void round(const float* from, std::int64_t place, at::BFloat16* to) const {
    Bits bits, places;
    for (int i = 0; i < lanes; ++i) places[i] = static_cast<std::uint32_t>(i);
    places += static_cast<std::uint32_t>(place);
    std::memcpy(&bits, from, sizeof(bits));
    round_stochastically(bits, places, static_cast<std::uint32_t>(place >> 32), key_);
    const Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }
#else
  static constexpr int lanes = 1;

  void round(const float* from, std::int64_t place, at::BFloat16* to) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, from, sizeof(bits));
    round_stochastically(bits, static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32), key_);
    to->x = static_cast<std::uint16_t>(bits);
  }
#endif

  at::BFloat16* array_;
  std::int64_t place_, count_;
  std::uint64_t key_;
  alignas(64) float floats_[size] = {};
};

/// Sums in float64: squares of finite 16- and 32-bit numbers stay finite, and millions of them lose no precision.
template <class T>
[[gnu::flatten]] double sum_of_squares(const void* numbers, std::int64_t count) {
  constexpr int width = Doubles::width;
  const auto* const from = static_cast<const T*>(numbers);
  auto a = Doubles::all(0), b = a, c = a, d = a;  // four independent sums, to hide latency
  std::int64_t i = 0;
  for (; i + 4 * width <= count; i += 4 * width) {
    const auto p = Doubles::load(from + i), q = Doubles::load(from + i + width);
    const auto r = Doubles::load(from + i + 2 * width), s = Doubles::load(from + i + 3 * width);
    a = multiply_add(p, p, a), b = multiply_add(q, q, b), c = multiply_add(r, r, c), d = multiply_add(s, s, d);
  }
  for (; i < count; i += width) {
    Rest<const T, width> rest(from + i, std::min<std::int64_t>(width, count - i));
    const auto last = Doubles::load(rest.vector());
    a = multiply_add(last, last, a);
  }
  return ((a + b) + (c + d)).sum();
}

inline SumOfSquares sum_of_squares_kernel(at::ScalarType dtype) {
  if (dtype == at::kDouble) return sum_of_squares<double>;
  if (dtype == at::kFloat) return sum_of_squares<float>;
  if (dtype == at::kHalf) return sum_of_squares<at::Half>;
  return sum_of_squares<at::BFloat16>;
}

/// The arithmetic of a step, for a kind of vectors. A user's step has its own.
template <class Step, class Vector>
struct Arithmetic : Step {
  explicit Arithmetic(const Step& step) : Step(step) {}
};
#define GRADACCUM_ARITHMETIC
#include <gradaccum/detail/kernels/steps/all.inl>
#undef GRADACCUM_ARITHMETIC

// files that use those above:
#include <gradaccum/detail/kernels/simd/elementwise.inl>
// files that use those above:
#include <gradaccum/detail/kernels/simd/adafactor_passes.inl>
#include <gradaccum/detail/kernels/simd/adam8bit.inl>

/// The kernels for some dtypes.
struct Kernels {
  OperandTypes types;

  template <class Step>
  Kernel* step() const {
    if constexpr (std::is_same_v<Step, Adam8bitStep>)
      return of_narrow_types<Kernel, Adam8bitOfTypes>(types);
    else
      return of_types<Kernel, ElementsOf<Step>::template OfTypes>(types);
  }
  AdafactorKernels adafactor() const { return of_types<AdafactorKernels(), AdafactorIn<>::OfTypes>(types)(); }
  SumOfSquares sum_of_squares() const { return sum_of_squares_kernel(types.parameter); }
};
