// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/number_text.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <cmath>
#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string count_text(std::int64_t count) {
  auto digits = fmt::format("{}", count);
  const int first = count < 0 ? 1 : 0;
  for (int at = static_cast<int>(digits.size()) - 3; at > first; at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');  // not ",", of which g++ 12 warns
  return digits;
}

GRADACCUM_INLINE std::string number_text(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number > 0 ? "∞" : "−∞";
  if (std::abs(number) >= 999.95 && std::abs(number) < 1e12) return count_text(std::llround(number));
  return fmt::format("{:.4g}", number);
}

GRADACCUM_INLINE std::string exact_text(double number) {
  return std::isnan(number) ? "nan" : fmt::format("{}", number);  // never -nan
}

}  // namespace gradaccum::detail
