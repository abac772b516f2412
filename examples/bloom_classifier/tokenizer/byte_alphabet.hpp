// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "utf8.hpp"

namespace bloom {

/// tokenizer.json writes each byte of a token as one visible character, as GPT-2 did: the printable characters of
/// Latin-1 stand for themselves, U+0100, U+0101, ... for the other bytes. A space is thus Ġ.
inline bool stands_for_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
}

/// Returns the character, in UTF-8, for each byte.
inline const std::array<std::string, 256>& byte_characters() {
  static const auto characters = [] {
    std::array<std::string, 256> result;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const auto c = stands_for_itself(byte) ? byte : next++;
      if (c < 0x80)
        result[byte] = static_cast<char>(c);
      else
        result[byte] = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    }
    return result;
  }();
  return characters;
}

/// Returns the byte that a character stands for.
inline std::optional<char> byte_of(char32_t character) {
  static const auto bytes = [] {
    std::array<std::optional<char>, 0x144> result;
    for (unsigned byte = 0; byte < 256; ++byte)
      result[first_code_point(byte_characters()[byte]).value] = static_cast<char>(byte);
    return result;
  }();
  return character < bytes.size() ? bytes[character] : std::nullopt;
}

inline std::string bytes_to_characters(std::string_view bytes) {
  std::string result;
  for (const char byte : bytes) result += byte_characters()[static_cast<unsigned char>(byte)];
  return result;
}

/// Returns a token's bytes, or the token itself if one of its characters stands for no byte.
inline std::string characters_to_bytes(std::string_view token) {
  std::string result;
  for (auto rest = token; !rest.empty();) {
    const auto c = first_code_point(rest);
    const auto byte = byte_of(c.value);
    if (!byte) return std::string(token);
    result += *byte;
    rest.remove_prefix(c.size);
  }
  return result;
}

}  // namespace bloom
