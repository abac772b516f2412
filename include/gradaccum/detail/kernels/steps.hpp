// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <tuple>
#include <type_traits>

#include <gradaccum/detail/kernels/on_device.hpp>

/// The steps of this library's optimizers. Each has a file in `steps/`, with two parts:
///
/// - Its settings and the names of its state's tensors, compiled once, for host and devices.
/// - Its arithmetic, written once for any vector of numbers: `Arithmetic<Step, Vector>`. Compiled for each instruction
///   set, and for devices, where a vector is one number.
///
/// Their list, in `steps/all.inl`, makes the kernels.
namespace gradaccum::detail {

/// Keeps a compiler from fusing a product, which is rounded here, with a sum: results then differ between processors.
template <class Number>
GRADACCUM_ON_DEVICE void keep_rounded(Number& product) {
#if defined(__CUDA_ARCH__) || !(defined(__GNUC__) || defined(__clang__))
  static_cast<void>(product);
#elif defined(__x86_64__)
  __asm__("" : "+x"(product));
#elif defined(__aarch64__)
  __asm__("" : "+w"(product));
#else
  __asm__("" : "+m"(product));
#endif
}

/// Returns 1 - a b, rounded twice.
GRADACCUM_ON_DEVICE inline double one_minus_product(double a, double b) {
  double product = a * b;
  keep_rounded(product);
  return 1 - product;
}

/// A struct of plain numbers of any class, by value.
class Plain {
 public:
  Plain() = default;
  template <class T>
  GRADACCUM_ON_DEVICE explicit Plain(const T& of) {
    set(of);
  }
  template <class T>
  GRADACCUM_ON_DEVICE void set(const T& of) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(bytes_) && alignof(T) <= alignof(double),
                  "the settings of a step must be plain numbers, of at most 112 bytes");
    std::memcpy(bytes_, &of, sizeof(T));
  }
  template <class T>
  GRADACCUM_ON_DEVICE const T& as() const {
    return *std::launder(reinterpret_cast<const T*>(bytes_));
  }

 private:
  alignas(double) unsigned char bytes_[112];
};

/// The largest number of tensors in a state.
inline constexpr std::size_t most_states = 4;

/// The arguments of a kernel: dense arrays of the same element order. State is float32 for 16-bit parameters, else of
/// the parameter's type.
struct Operand {
  Plain numbers{};        ///< see NumbersOf
  double multiplier = 1;  ///< of the gradient: deferred scale, mean and clipping
  void* parameter = nullptr;
  const void* gradient = nullptr;
  std::array<void*, most_states> state{};  ///< null if absent
  std::uint64_t rounding_key = 0;          ///< for stochastic rounding
};

/// Updates elements [from, from + count) of a parameter. With 8-bit moments `from` is a multiple of the block size, and
/// so is `count` except at the end of an array.
using Kernel = void(const Operand&, std::int64_t from, std::int64_t count);

/// The dtypes of a kernel's operands.
struct OperandTypes {
  at::ScalarType parameter, gradient;
  bool rounded;  ///< stochastically

  auto operator<=>(const OperandTypes&) const = default;
};

using SumOfSquares = double (*)(const void* numbers, std::int64_t count);

/// Returns the numbers that the arithmetic needs: the settings, unless the step computes others from them.
template <class Step>
GRADACCUM_ON_DEVICE auto numbers_of(const Step& step) {
  if constexpr (requires { step.numbers(); })
    return step.numbers();
  else
    return step;
}
template <class Step>
using NumbersOf = decltype(numbers_of(Step()));

template <class Step>
inline constexpr std::size_t number_of_states = std::size(Step::state);

}  // namespace gradaccum::detail

#include <gradaccum/detail/kernels/steps/all.inl>

namespace gradaccum::detail {

/// A step's place in a tuple; the tuple's size if it is not there.
template <class Step, class... All>
constexpr std::size_t place_in(std::type_identity<std::tuple<All...>>) {
  std::size_t place = 0;
  static_cast<void>(((std::is_same_v<Step, All> || (++place, false)) || ...));
  return place;
}
template <class Step>
inline constexpr std::size_t place_in_list = place_in<Step>(std::type_identity<Steps>());
template <class Step>
inline constexpr bool is_listed = place_in_list<Step> < std::tuple_size_v<Steps>;

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
