// SPDX-License-Identifier: Apache-2.0
//
// How stochastic rounding rounds. Included by kernels.ipp for each instruction set.

/// The `bits` of float32 numbers become those of bfloat16, rounded up or down at random, each way as often as it is
/// near. The random bits are a hash of `key` and of each number's place. `Bits` is an unsigned number of 32 bits, or a
/// vector of the compiler's own.
template <class Bits>
GRADACCUM_ON_DEVICE void round_stochastically(Bits& bits, const Bits& places, std::uint32_t upper_bits_of_places,
                                              std::uint64_t key) {
  auto random = places + static_cast<std::uint32_t>(key);
  // A bijection in which each bit depends on all: so each of the 2^16 fractions comes equally often.
  random = (random ^ (random >> 16)) * 0x7feb352du;
  random += static_cast<std::uint32_t>(key >> 32) + upper_bits_of_places;
  random = (random ^ (random >> 15)) * 0x846ca68bu;
  random ^= random >> 16;
  const Bits is_nan = 0u - ((0x7f800000u - (bits & 0x7fffffffu)) >> 31);  // all bits where it is, else none
  const Bits carried = bits + (random & 0xffffu);  // carries into the upper half as often as the lower half is large
  bits = ((carried & ~is_nan) | (0x7fc00000u & is_nan)) >> 16;
}
