// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace bloom {

/// A code point and the number of its bytes. For bytes that are not UTF-8 it is U+FFFD, not valid, for as many bytes as
/// Python's `bytes.decode(errors="replace")` replaces by one.
struct CodePoint {
  char32_t value = 0xFFFD;
  std::size_t size = 1;
  bool valid = false;
};

/// Returns the first code point of a nonempty text.
inline CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  if (lead < 0xC2 || lead > 0xF4) return {};
  const std::size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's bounds exclude long forms, surrogates, and numbers beyond U+10FFFF.
  auto lowest = lead == 0xE0 ? 0xA0u : lead == 0xF0 ? 0x90u : 0x80u;
  auto highest = lead == 0xED ? 0x9Fu : lead == 0xF4 ? 0x8Fu : 0xBFu;
  char32_t value = lead & (0x7Fu >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if (byte(i) < lowest || byte(i) > highest) return {0xFFFD, i, false};
    value = value << 6 | (byte(i) & 0x3F);
    lowest = 0x80, highest = 0xBF;
  }
  return {value, size, true};
}

inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    std::uint64_t eight = 0x80;
    if (text.size() >= 8) std::memcpy(&eight, text.data(), 8);
    if ((eight & 0x8080808080808080u) == 0) {  // eight ASCII characters
      text.remove_prefix(8);
      continue;
    }
    const auto code_point = first_code_point(text);
    if (!code_point.valid) return false;
    text.remove_prefix(code_point.size);
  }
  return true;
}

/// Returns the text with U+FFFD in place of invalid bytes.
inline std::string to_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto code_point = first_code_point(text);
    result += code_point.valid ? text.substr(0, code_point.size) : "\xEF\xBF\xBD";
    text.remove_prefix(code_point.size);
  }
  return result;
}

}  // namespace bloom
