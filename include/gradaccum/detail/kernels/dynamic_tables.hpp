// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace gradaccum::detail {

/// The 256 numbers that a code of 8 bits may stand for, from -1 or 0 to 1: dynamic quantisation (Dettmers and others,
/// 2021), the map of bitsandbytes to 1 part in 30,000. Seven decades; the larger the numbers, the more there are in a
/// decade, evenly spread.
///
/// Counted by `k`, each decade begins at a power of two. Signed: code 127 + k is the k-th number above 0, 127 - k its
/// negative; -1 has no code. Unsigned: code k - 1 is the k-th number, the first of which is 0.
///
/// Base and slope of a decade have so few digits that the numbers, and the middles between them, are exact in float32:
/// one comparison finds the nearest.
struct DynamicTables {
  using Table = std::array<float, 16>;

  /// Decoding: the number is `base + slope * k`. By the low four bits of k's exponent in float32, which is biased.
  Table base{}, slope{};
  /// Encoding, by the decade, counted from 0: 0 and 1 are decades of their own. Larger numbers than `edge` are in the
  /// next. Codes (of signed ones, k) lie from `first` to `last`; `scale * x + offset` gives it, or a fraction less than
  /// half away; numbers above `middle + spread * code` are nearer to the next.
  Table edge{}, first{}, last{}, scale{}, offset{}, middle{}, spread{};
};

/// Numbers that share a scale, one after another in memory.
inline constexpr std::int64_t eight_bit_block = 256;
constexpr std::int64_t eight_bit_blocks(std::int64_t elements) {
  return elements / eight_bit_block + (elements % eight_bit_block > 0 ? 1 : 0);  // of any number that a file may have
}
/// The code of 0 in the signed map; in the unsigned one it is 0.
inline constexpr std::uint8_t zero_code = 127;

}  // namespace gradaccum::detail
