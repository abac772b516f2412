// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/html_text.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>

namespace gradaccum::detail {

/// The first character of a text, and how many bytes it takes; none where it is no UTF-8, then one byte.
struct FirstCharacter {
  static constexpr char32_t none = 0xfffd;

  char32_t code = none;
  std::size_t bytes = 1;
};

GRADACCUM_INLINE FirstCharacter first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  auto code = static_cast<char32_t>(lead & (0x7f >> bytes));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool shortest = code >= (bytes == 4 ? 0x10000u : bytes == 3 ? 0x800u : 0x80u);
  if (!shortest || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return {};
  return {code, bytes};
}

GRADACCUM_INLINE bool is_shown(char32_t code) {
  const bool is_control = (code < ' ' && code != '\n' && code != '\t') || (code >= 0x7f && code < 0xa0);
  const bool turns = code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
                     (code >= 0x2066 && code <= 0x2069);
  const bool is_none = (code & 0xfffe) == 0xfffe || (code >= 0xfdd0 && code <= 0xfdef) || code == 0xfeff;
  return !is_control && !turns && !is_none;
}

GRADACCUM_INLINE std::string_view html_name(char32_t code) {
  switch (code) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    case '`':
      return "&#96;";
    default:
      return {};
  }
}

GRADACCUM_INLINE std::string html_text(std::string_view text, std::size_t most) {
  std::string html;
  for (std::size_t count = 0; !text.empty(); ++count) {
    if (count == most) return html + "…";
    const auto [code, bytes] = first_character(text);
    const auto name = html_name(code);
    const bool is_valid = code != FirstCharacter::none && is_shown(code);
    html += !is_valid ? "�" : name.empty() ? text.substr(0, bytes) : name;
    text.remove_prefix(bytes);
  }
  return html;
}

}  // namespace gradaccum::detail
