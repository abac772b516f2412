// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <gradaccum/checkpointed_sequential.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace fashion_mnist {

namespace detail {

/// Parses a number; the text must contain nothing else.
template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

inline std::optional<double> bytes_of_unit(std::string_view unit) {
  constexpr std::array<std::pair<std::string_view, double>, 4> units{
      {{"B", 1}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}}};
  for (const auto& [name, bytes] : units)
    if (unit == name) return bytes;
  return std::nullopt;
}

}  // namespace detail

/// Parses `12MiB` or `1.5GiB`; empty if the text has another form or is less than a byte.
inline std::optional<std::int64_t> number_of_bytes(std::string_view text) {
  const auto digits = text.substr(0, std::min(text.find_first_not_of("0123456789."), text.size()));
  const auto number = detail::number_of<double>(digits), scale = detail::bytes_of_unit(text.substr(digits.size()));
  const auto bytes = number && scale ? *number * *scale : 0;
  if (bytes < 1) return std::nullopt;
  return static_cast<std::int64_t>(std::min(bytes, 0x1p62));
}

/// Parses --checkpoint: a number of segments (`4`), or with a unit a memory budget (`12MiB`, `1.5GiB`).
inline gradaccum::CheckpointedSequentialOptions checkpoint_choice(const std::string& text) {
  if (const auto segments = detail::number_of<std::int64_t>(text); segments && *segments >= 1)
    return {.segments = *segments};
  if (const auto bytes = number_of_bytes(text)) return {.memory_budget = *bytes};
  throw std::invalid_argument(
      "--checkpoint: must be a number of segments (4) or of bytes, in B, KiB, MiB or GiB (12MiB), at least 1, got '" +
      text + "'");
}

}  // namespace fashion_mnist
