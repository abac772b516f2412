// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/machine/screen.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <vector>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string without_control_characters(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return (c >= 0 && c < ' ') || c == '\x7f'; }, ' ');
  return text;
}

/// The words of a text, of at most that many characters each.
GRADACCUM_INLINE std::vector<std::string> words_of(const std::string& text, std::size_t most) {
  std::vector<std::string> parts;
  std::istringstream words(without_control_characters(text));
  for (std::string word; words >> word;)
    for (std::size_t at = 0; at < word.size(); at += most) parts.push_back(word.substr(at, most));
  return parts;
}

GRADACCUM_INLINE std::vector<std::string> wrapped(const std::string& text, std::size_t width) {
  std::vector<std::string> lines{""};
  for (auto& word : words_of(text, width)) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

GRADACCUM_INLINE std::string in_column(std::string head, const std::string& text, std::size_t width) {
  const std::size_t margin = head.size();
  std::string column;
  for (auto& line : wrapped(text, width - margin)) {
    column += head + line + '\n';
    head.assign(margin, ' ');
  }
  return column;
}

}  // namespace gradaccum::detail
