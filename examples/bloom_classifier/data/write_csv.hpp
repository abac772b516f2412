// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/reviews.hpp"
#include "data/text_file.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ios>
#include <string>
#include <vector>

namespace bloom {

/// Formats a CSV file (RFC 4180): columns `text` and `label`, all texts in quotes. `name` is for errors.
inline std::string format_csv(const std::vector<Review>& rows, const std::string& name) {
  std::string bytes = "text,label\r\n";
  for (const auto& row : rows) {
    // Reading would refuse or skip these.
    if (is_blank(row.text)) data_error(name, "a review must have text, got ", shown(row.text));
    if (row.text.find('\0') != row.text.npos) data_error(name, "a text must have no zero byte, got ", shown(row.text));
    check_utf8(row.text, name);
    if (row.label < 0) data_error(name, "a label must be an integer from 0 on, got ", row.label);
    bytes += '"';
    for (const char c : row.text) bytes.append(c == '"' ? 2 : 1, c);
    bytes += "\"," + std::to_string(row.label) + "\r\n";
  }
  return bytes;
}

/// Writes a file from which read_csv, if its limits allow it, reads equal reviews.
inline void write_csv(const std::filesystem::path& path, const std::vector<Review>& rows) {
  const auto bytes = format_csv(rows, path.string());
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) data_error(path.string(), "must be writable, got '", std::strerror(errno), "'");
}

}  // namespace bloom
