// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tokenizer/utf8.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace bloom {

/// Throws an error with the location, the requirement and the value.
template <class... Parts>
[[noreturn]] void data_error(const std::string& where, const Parts&... parts) {
  std::ostringstream message;
  message << where << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

/// Formats a value for errors: in quotes, at most 40 bytes, without control characters.
inline std::string shown(std::string_view value) {
  constexpr std::size_t limit = 40;
  std::size_t size = value.size();
  if (size > limit) {
    size = limit;
    while (size > 0 && (value[size] & 0xC0) == 0x80) --size;  // does not cut a character of several bytes
  }
  std::string text = "'";
  for (const char c : value.substr(0, size)) text += (c >= 0 && c < ' ') || c == '\x7f' ? '?' : c;
  return text + (size < value.size() ? "...'" : "'");
}

/// Returns whether a text is only white space.
inline bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n\v\f") == text.npos; }

/// Throws unless a text is UTF-8: a model would read most letters of another encoding as U+FFFD.
inline void check_utf8(std::string_view text, const std::string& where) {
  if (!is_utf8(text))
    data_error(where, "must be UTF-8, got ", shown(to_utf8(text)),
               "; iconv -f latin1 -t utf-8 converts a latin-1 file");
}

/// Reads all bytes of a regular file. Checks its size before memory is allocated.
inline std::string read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  // Opening a directory would succeed, and opening a pipe would wait for its writer.
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found)
    data_error(path.string(), "must exist, but there is no such file");
  if (error) data_error(path.string(), "must be readable, got '", error.message(), "'");
  if (!is_regular_file(status)) data_error(path.string(), "must be a regular file, but is not");
  const std::uint64_t size = std::filesystem::file_size(path);
  if (size > max_bytes) data_error(path.string(), "must have at most ", max_bytes, " bytes, got ", size);

  std::ifstream file(path, std::ios::binary);
  if (!file) data_error(path.string(), "must be readable, but cannot be opened");
  std::string bytes(size, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(size));
  if (!file || file.peek() != std::ifstream::traits_type::eof())
    data_error(path.string(), "must not change while it is read, but did");
  return bytes;
}

}  // namespace bloom
