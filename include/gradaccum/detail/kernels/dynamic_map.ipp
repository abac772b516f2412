// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dynamic_map.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cmath>
#include <cstddef>
#include <limits>

namespace gradaccum::detail {

/// Returns the k-th number, k >= 1.
GRADACCUM_INLINE float dynamic_number(const DynamicMap& map, int k) {
  const auto entry = static_cast<std::size_t>(std::ilogb(static_cast<float>(k)) + 127) % 16;
  return map.base[entry] + map.slope[entry] * static_cast<float>(k);
}

GRADACCUM_INLINE DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map;
  const int shift = is_signed ? 0 : 1;  // the unsigned map has twice as many numbers per decade
  const auto entry = [](int i) { return static_cast<std::size_t>(i + 127) % 16; };
  for (int i = 0; i < DynamicMap::decades; ++i) {
    const double size = std::ldexp(1.0, i + shift), ten = std::pow(10.0, i - DynamicMap::decades + 1);
    const double slope = 0.9 * ten / size, digit = std::ldexp(1.0, std::ilogb(ten) - 22);
    const double rounded = std::round(slope / digit) * digit, middle = 1.5 * size;  // the point without rounding error
    const double base = (0.45 / size - 0.8) * ten + (slope - rounded) * middle;
    map.slope[entry(i + shift)] = static_cast<float>(rounded);
    map.base[entry(i + shift)] = static_cast<float>(std::round(base / digit) * digit);
  }
  // k = 1 of the unsigned map is 0, as in its tables. The last k, beyond all decades, is 1.
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

GRADACCUM_INLINE const DynamicMap& signed_map() {
  static const DynamicMap map = make_dynamic_map(true);
  return map;
}
GRADACCUM_INLINE const DynamicMap& unsigned_map() {
  static const DynamicMap map = make_dynamic_map(false);
  return map;
}

GRADACCUM_INLINE const DynamicMap& second_moment_map() {
  static const DynamicMap map = [] {
    auto from_zero = unsigned_map();
    from_zero.edge[0] = 0;
    return from_zero;
  }();
  return map;
}

}  // namespace gradaccum::detail
