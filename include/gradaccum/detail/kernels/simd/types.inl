// SPDX-License-Identifier: Apache-2.0
//
// Selects vectors and kernels by the dtypes of operands, and rounds stochastically. Included with the kernels.

/// The vectors that numbers of this type are computed in.
template <class T>
using VectorOf = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

/// Returns `Of<P, G, rounded>::run` for the dtypes of a parameter, except float64, and its gradient, which may be
/// float32 for 16-bit parameters. `rounded`: rounds bfloat16 parameters stochastically.
template <class Function, template <class P, class G, bool rounded> class Of>
Function* of_narrow_types(const OperandTypes& types) {
  using at::BFloat16, at::Half;
  const bool same = types.parameter == types.gradient;
  if (types.rounded) return same ? Of<BFloat16, BFloat16, true>::run : Of<BFloat16, float, true>::run;
  if (types.parameter == at::kFloat) return Of<float, float, false>::run;
  if (types.parameter == at::kHalf) return same ? Of<Half, Half, false>::run : Of<Half, float, false>::run;
  return same ? Of<BFloat16, BFloat16, false>::run : Of<BFloat16, float, false>::run;
}
template <class Function, template <class P, class G, bool rounded> class Of>
Function* of_types(const OperandTypes& types) {
  if (types.parameter == at::kDouble) return Of<double, double, false>::run;
  return of_narrow_types<Function, Of>(types);
}

/// Converts the `bits` of float32 numbers to bfloat16, rounded up or down at random without bias. The random
/// bits are a hash of `key` and of each number's position. `Bits` is a 32-bit unsigned integer or a vector of the
/// compiler's.
template <class Bits>
GRADACCUM_ON_DEVICE void round_stochastically(Bits& bits, const Bits& places, std::uint32_t upper_bits_of_places,
                                              std::uint64_t key) {
  auto random = places + static_cast<std::uint32_t>(key);
  // A bijection in which each bit depends on all others, so that each of the 2^16 fractions is equally frequent.
  random = (random ^ (random >> 16)) * 0x7feb352du;
  random += static_cast<std::uint32_t>(key >> 32) + upper_bits_of_places;
  random = (random ^ (random >> 15)) * 0x846ca68bu;
  random ^= random >> 16;
  const Bits is_nan = 0u - ((0x7f800000u - (bits & 0x7fffffffu)) >> 31);  // all bits for NaN, else 0
  const Bits carried = bits + (random & 0xffffu);  // carries with a probability of the lower half / 2^16
  bits = ((carried & ~is_nan) | (0x7fc00000u & is_nan)) >> 16;
}
