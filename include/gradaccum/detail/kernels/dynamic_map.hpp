// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace gradaccum::detail {

/// The 256 numbers of an 8-bit code, from -1 or 0 to 1, by dynamic quantisation (Dettmers et al., 2021). They equal the
/// map of bitsandbytes to 1 part in 30,000. There are seven decades of evenly spaced numbers; larger numbers have
/// denser decades.
///
/// Counted by `k`, each decade begins at a power of two. Signed map: code 127 + k is the k-th number above 0, and code
/// 127 - k its negative; -1 has no code. Unsigned map: code k - 1 is the k-th number, the first of which is 0.
///
/// The base and slope of a decade have so few digits that the numbers, and the midpoints between them, are exact in
/// float32: a single comparison finds the nearest number.
struct DynamicTables {
  using Table = std::array<float, 16>;

  /// Decoding: the number is `base + slope * k`. Indexed by the low four bits of the biased exponent of k as float32.
  Table base{}, slope{};
  /// Encoding, indexed by the decade, counted from 0; the numbers 0 and 1 form separate decades. Numbers above `edge`
  /// belong to the next decade. Codes (k for the signed map) range from `first` to `last`. `scale * x + offset` is less
  /// than one half away from the code; numbers above `middle + spread * code` are nearer to the next code.
  Table edge{}, first{}, last{}, scale{}, offset{}, middle{}, spread{};
};

/// The number of consecutive elements that share a scale.
inline constexpr std::int64_t eight_bit_block = 256;
constexpr std::int64_t eight_bit_blocks(std::int64_t elements) {
  return elements / eight_bit_block + (elements % eight_bit_block > 0 ? 1 : 0);  // no overflow for any number
}
/// The code of 0 in the signed map. It is 0 in the unsigned map.
inline constexpr std::uint8_t zero_code = 127;

/// The tables together with all 256 numbers.
struct DynamicMap : DynamicTables {
  static constexpr int decades = 7;
  std::array<float, 256> values{};
};

const DynamicMap& signed_map();
/// Returns the unsigned map. No positive value rounds to 0, since steps are divided by the roots of second moments:
/// they would be up to 30 times too large until the moment has grown again.
const DynamicMap& second_moment_map();

}  // namespace gradaccum::detail
