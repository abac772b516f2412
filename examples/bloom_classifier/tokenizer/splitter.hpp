// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

#include "utf8.hpp"

namespace bloom {

/// The expression by which BLOOM splits text, in Oniguruma's syntax, where a [ within [^...] opens a nested class: it
/// ends at the first ], and ( ) | are ordinary characters. Most engines of regular expressions refuse it or read it
/// differently, so `next_piece` implements it by hand.
inline constexpr const char* split_expression = " ?[^(\\s|[.,!?…。，、।۔،])]+";

/// Returns whether a character is BLOOM's punctuation or white space. Brackets, quotes and slashes are parts of words.
inline bool is_outside_words(char32_t c) {
  switch (c) {
    case U'(':
    case U')':
    case U'|':
    case U'.':
    case U',':
    case U'!':
    case U'?':  // clang-format off
    case U'…': case U'。': case U'，': case U'、': case U'।': case U'۔': case U'،':
    case 0x09: case 0x0A: case 0x0B: case 0x0C: case 0x0D: case 0x20: case 0x85: case 0xA0: case 0x1680:
    case 0x2028: case 0x2029: case 0x202F: case 0x205F: case 0x3000:  // clang-format on
      return true;
    default:
      return c >= 0x2000 && c <= 0x200A;
  }
}

/// Returns whether a word, or a space before a word, begins here.
inline bool begins_word(std::string_view text) {
  if (text.starts_with(' ')) text.remove_prefix(1);
  return !text.empty() && !is_outside_words(first_code_point(text).value);
}

/// Returns the first piece of a nonempty text: a word with the space before it, or everything up to the next such word.
///
/// The pieces of a text follow each other without gaps: `for (; !text.empty(); text.remove_prefix(piece.size()))`.
inline std::string_view next_piece(std::string_view text) {
  std::size_t end = 0;
  if (begins_word(text)) {
    end = text.starts_with(' ') ? 1 : 0;
    while (end < text.size()) {
      const auto c = first_code_point(text.substr(end));
      if (is_outside_words(c.value)) break;
      end += c.size;
    }
  } else {
    do end += first_code_point(text.substr(end)).size;
    while (end < text.size() && !begins_word(text.substr(end)));
  }
  return text.substr(0, end);
}

}  // namespace bloom
