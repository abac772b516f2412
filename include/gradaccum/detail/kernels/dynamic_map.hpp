// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

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
struct DynamicMap {
  static constexpr int decades = 7;
  using Table = std::array<float, 16>;

  /// Decoding: the number is `base + slope * k`. By the low four bits of k's exponent in float32, which is biased.
  Table base{}, slope{};
  /// Encoding, by the decade, counted from 0: 0 and 1 are decades of their own. Larger numbers than `edge` are in the
  /// next. Codes (of signed ones, k) lie from `first` to `last`; `scale * x + offset` gives it, or a fraction less than
  /// half away; numbers above `middle + spread * code` are nearer to the next.
  Table edge{}, first{}, last{}, scale{}, offset{}, middle{}, spread{};
  std::array<float, 256> values{};
};

/// Of k >= 1.
inline float dynamic_number(const DynamicMap& map, int k) {
  const auto entry = static_cast<std::size_t>(std::ilogb(static_cast<float>(k)) + 127) % 16;
  return map.base[entry] + map.slope[entry] * static_cast<float>(k);
}

inline DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map;
  const int shift = is_signed ? 0 : 1;  // the unsigned one has twice as many numbers in each decade
  const auto entry = [](int i) { return static_cast<std::size_t>(i + 127) % 16; };
  for (int i = 0; i < DynamicMap::decades; ++i) {
    const double size = std::ldexp(1.0, i + shift), ten = std::pow(10.0, i - DynamicMap::decades + 1);
    const double slope = 0.9 * ten / size, digit = std::ldexp(1.0, std::ilogb(ten) - 22);
    const double rounded = std::round(slope / digit) * digit, middle = 1.5 * size;  // where there is to be no error
    const double base = (0.45 / size - 0.8) * ten + (slope - rounded) * middle;
    map.slope[entry(i + shift)] = static_cast<float>(rounded);
    map.base[entry(i + shift)] = static_cast<float>(std::round(base / digit) * digit);
  }
  // k = 1 of the unsigned one is 0: as its tables have it. The last k, beyond all decades, is 1.
  map.base[entry(DynamicMap::decades + shift)] = 1;
  const auto number = [&](int k) { return k == 0 ? 0 : dynamic_number(map, k); };

  for (std::size_t decade = 0; decade <= DynamicMap::decades + 1; ++decade) {
    const int first = (1 << (static_cast<int>(decade) + shift)) / 2, last = 2 * first - (first > 0);
    const bool even = decade > 0 && decade <= DynamicMap::decades;
    const auto in = even ? entry(std::ilogb(static_cast<float>(first))) : 0;
    const auto code = [&](int k) { return static_cast<float>(k - shift); };
    map.first[decade] = code(first);
    map.last[decade] = even ? code(last) : code(first);
    map.scale[decade] = even ? 1 / map.slope[in] : 0;
    map.offset[decade] = even ? -map.base[in] / map.slope[in] - static_cast<float>(shift) : code(first);
    map.spread[decade] = even ? map.slope[in] : 0;
    map.middle[decade] = even ? map.base[in] + map.slope[in] * (0.5f + static_cast<float>(shift))
                              : std::numeric_limits<float>::infinity();
    if (decade <= DynamicMap::decades) {
      const int next = first == 0 ? 1 : 2 * first;
      map.edge[decade] = number(next - 1) + (number(next) - number(next - 1)) / 2;
    }
  }
  for (int code = 0; code < 256; ++code)
    map.values[static_cast<std::size_t>(code)] = !is_signed   ? number(code + 1)
                                                 : code < 127 ? -number(127 - code)
                                                              : number(code - 127);
  return map;
}

inline const DynamicMap& signed_map() {
  static const DynamicMap map = make_dynamic_map(true);
  return map;
}
inline const DynamicMap& unsigned_map() {
  static const DynamicMap map = make_dynamic_map(false);
  return map;
}

/// For second moments, whose square roots steps are divided by: none that is above 0 becomes 0, however small it is
/// beside the largest of its block. Its steps would be up to 30 times too large until it has grown again.
inline const DynamicMap& second_moment_map() {
  static const DynamicMap map = [] {
    auto map = unsigned_map();
    map.edge[0] = 0;
    return map;
  }();
  return map;
}

/// Numbers that share a scale, one after another in memory.
inline constexpr std::int64_t eight_bit_block = 256;
/// The code of 0 in the signed map; in the unsigned one it is 0.
inline constexpr std::uint8_t zero_code = 127;

}  // namespace gradaccum::detail
