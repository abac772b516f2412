// SPDX-License-Identifier: Apache-2.0
//
// All device kernels, in the namespace of the including file: kernels.cu for devices, and tests for the host, where the
// threads of a block run in turn. Presents the threads of a block as an instruction set: kernels are written once for
// vectors; here a vector is one number, and a loop over arrays is divided among the threads. The including file defines
// `this_thread()`.

using FloatPart = float;
using IntPart = std::int32_t;
using DoublePart = double;
inline constexpr int float_parts = 1, double_parts = 1;
/// Rounds once, like the fused instructions of processors.
template <class Number>
GRADACCUM_ON_DEVICE Number product_plus(Number a, Number b, Number c) {
  return std::fma(a, b, c);
}
#include <gradaccum/detail/kernels/simd/lanes.inl>
#include <gradaccum/detail/kernels/simd/types.inl>

template <class T>
struct alignas(sizeof(T) < 4 ? pack_size * sizeof(T) : 16) AlignedPack {
  T numbers[pack_size];
};

/// Returns true for one aligned pack; with `whole` the caller knows that it is one.
template <bool whole = false, class T>
GRADACCUM_ON_DEVICE bool is_one_pack(const T* array, std::int64_t count) {
  return whole || (count >= pack_size && reinterpret_cast<std::uintptr_t>(array) % alignof(AlignedPack<T>) == 0);
}

/// Loads a pack, with `rest` beyond the end.
template <bool whole = false, class T>
GRADACCUM_ON_DEVICE AlignedPack<T> load_pack(const T* array, std::int64_t from, std::int64_t count, T rest = T(0)) {
  if (is_one_pack<whole>(array + from, count)) return *reinterpret_cast<const AlignedPack<T>*>(array + from);
  AlignedPack<T> pack;
  GRADACCUM_UNROLL
  for (int i = 0; i < pack_size; ++i) pack.numbers[i] = i < count ? array[from + i] : rest;
  return pack;
}
template <bool whole = false, class T>
GRADACCUM_ON_DEVICE void store_pack(T* array, std::int64_t from, std::int64_t count, const AlignedPack<T>& pack) {
  if (is_one_pack<whole>(array + from, count)) {
    *reinterpret_cast<AlignedPack<T>*>(array + from) = pack;
    return;
  }
  GRADACCUM_UNROLL
  for (int i = 0; i < pack_size; ++i)
    if (i < count) array[from + i] = pack.numbers[i];
}

/// Up to `count` elements of an array in a thread's registers, written back on destruction. A null array is ignored.
template <class Array, bool whole = false>
class Pack;
template <class T, bool whole>
class Pack<T*, whole> {
 public:
  GRADACCUM_ON_DEVICE Pack(T* array, std::int64_t from, std::int64_t count)
      : array_(array), from_(from), count_(count) {
    if (whole || array) pack_ = load_pack<whole>(array, from, count);
  }
  Pack(const Pack&) = delete;
  GRADACCUM_ON_DEVICE ~Pack() {
    if constexpr (!std::is_const_v<T>)
      if (whole || array_) store_pack<whole>(array_, from_, count_, pack_);
  }
  GRADACCUM_ON_DEVICE T* element(int i) { return pack_.numbers + i; }

 private:
  T* array_;
  std::int64_t from_, count_;
  AlignedPack<std::remove_const_t<T>> pack_;
};

/// A bfloat16 array that is computed with in float32 and rounded stochastically when it is written back. Kernels
/// process it in chunks; on a device a chunk is the whole array.
struct RoundedChunk {
  static constexpr std::int64_t size = std::int64_t{1} << 62;
  GRADACCUM_ON_DEVICE static std::int64_t part_of(std::int64_t count) { return count; }

  GRADACCUM_ON_DEVICE RoundedChunk(at::BFloat16* of, std::int64_t first, std::int64_t /*count*/, std::uint64_t by)
      : array(of + first), place(first), key(by) {}
  GRADACCUM_ON_DEVICE explicit operator bool() const { return true; }
  GRADACCUM_ON_DEVICE RoundedChunk floats() const { return *this; }

  at::BFloat16* array;
  std::int64_t place;  ///< position of the first element in the tensor
  std::uint64_t key;
};
template <bool whole>
class Pack<RoundedChunk, whole> {
 public:
  GRADACCUM_ON_DEVICE Pack(const RoundedChunk& of, std::int64_t from, std::int64_t count)
      : of_(of), from_(from), numbers_(of.array, from, count) {
    GRADACCUM_UNROLL
    for (int i = 0; i < pack_size; ++i) floats_[i] = static_cast<float>(*numbers_.element(i));
  }
  GRADACCUM_ON_DEVICE ~Pack() {
    const auto place = of_.place + from_;
    GRADACCUM_UNROLL
    for (int i = 0; i < pack_size; ++i) {
      auto bits = std::bit_cast<std::uint32_t>(floats_[i]);
      round_stochastically(bits, static_cast<std::uint32_t>(place + i), static_cast<std::uint32_t>(place >> 32),
                           of_.key);
      *numbers_.element(i) = at::BFloat16(static_cast<std::uint16_t>(bits), at::BFloat16::from_bits());
    }
  }
  GRADACCUM_ON_DEVICE float* element(int i) { return floats_ + i; }

 private:
  RoundedChunk of_;
  std::int64_t from_;
  Pack<at::BFloat16*, whole> numbers_;
  float floats_[pack_size];
};

/// A pack of parameters, and the array that it is made from.
template <class P, bool rounded, bool whole = false>
using ParameterPack = Pack<std::conditional_t<rounded, RoundedChunk, P*>, whole>;
template <class P, bool rounded, class Operand>
GRADACCUM_ON_DEVICE auto parameters_of(const Operand& o) {
  auto* const parameters = static_cast<P*>(o.parameter);
  if constexpr (rounded)
    return RoundedChunk(parameters, 0, 0, o.rounding_key);
  else
    return parameters;
}

/// Passes nullptr for the last array if it is missing. A compile-time flag keeps the packs in registers.
template <bool last_is_there, std::size_t... places, class Update, class... Packs>
GRADACCUM_ON_DEVICE void update_packs(std::index_sequence<places...>, const Update& update, Packs&&... packs) {
  GRADACCUM_UNROLL
  for (int i = 0; i < pack_size; ++i)
    update((last_is_there || places + 1 < sizeof...(places) ? packs.element(i) : nullptr)...);
}

template <bool last_is_there, class Update, class... Arrays>
GRADACCUM_ON_DEVICE void for_each_pack(const Update& update, std::int64_t count, Arrays... arrays) {
  for (std::int64_t i = pack_size * this_thread(); i < count; i += pack_size * threads_of_block)
    update_packs<last_is_there>(std::index_sequence_for<Arrays...>(), update, Pack<Arrays>(arrays, i, count - i)...);
}

/// Calls `update` with pointers to one element of each array; threads share the elements. The last array may be null.
template <int width, class Update, class... Arrays>
GRADACCUM_ON_DEVICE void for_each_vector(const Update& update, std::int64_t count, Arrays... arrays) {
  static_assert(width == 1);
  bool last_is_there = true;
  ((last_is_there = static_cast<bool>(arrays)), ...);
  last_is_there ? for_each_pack<true>(update, count, arrays...) : for_each_pack<false>(update, count, arrays...);
}

/// Returns the index of the tensor that contains `block`: the last whose first block is not after it.
template <std::size_t capacity>
GRADACCUM_ON_DEVICE std::size_t place_of_block(const std::array<std::int32_t, capacity>& first_blocks,
                                               std::int64_t size, std::int64_t block) {
  std::size_t first = 0, end = static_cast<std::size_t>(size);
  while (end - first > 1) {
    const auto middle = (first + end) / 2;
    (first_blocks[middle] <= block ? first : end) = middle;
  }
  return first;
}

/// Adds up the numbers at `from`, `from + step` and so on, before `to`, in this order. Loads several ahead: a thread
/// that loads one at a time waits for memory each time.
template <class T>
GRADACCUM_ON_DEVICE double sum_of(const T* numbers, std::int64_t from, std::int64_t to, std::int64_t step) {
  constexpr int ahead = 16;
  double sum = 0;
  for (; from < to; from += ahead * step) {
    T loaded[ahead];
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i) loaded[i] = from + i * step < to ? numbers[from + i * step] : T(0);
    GRADACCUM_UNROLL
    for (int i = 0; i < ahead; ++i) sum += static_cast<double>(loaded[i]);  // never -0, which + 0 would change
  }
  return sum;
}

/// The arithmetic of a step, for a kind of vectors.
template <class Step, class Vector>
struct Arithmetic;
#define GRADACCUM_ARITHMETIC
#include <gradaccum/detail/kernels/steps/all.inl>
#undef GRADACCUM_ARITHMETIC

// kernels shared with the CPU:
#include <gradaccum/detail/kernels/simd/eight_bit.inl>
#include <gradaccum/detail/kernels/simd/elementwise.inl>
// thread blocks that run them:
#include <gradaccum/detail/kernels/device/steps.inl>
#include <gradaccum/detail/kernels/device/window_end.inl>
// files that use those above:
#include <gradaccum/detail/kernels/device/adafactor.inl>

inline constexpr DeviceKernels all_kernels{.steps = run_steps(std::type_identity<Steps>()),
                                           .adafactor = run_adafactor,
                                           .l2_norms = run_l2_norms,
                                           .window_norm = run_one<WindowNormBlock>,
                                           .update_scale = run_one<ScaleBlock>};
