// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <stdlib.h>

namespace testing {

/// A new directory, removed with its content by the destructor.
class Directory {
 public:
  Directory() {
    auto name = (std::filesystem::temp_directory_path() / "gradaccum.XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no directory " + name);
    path_ = name;
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() { std::filesystem::remove_all(path_); }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// A file without a name.
class Scratch {
 public:
  operator std::FILE*() const { return file_.get(); }  // NOLINT(google-explicit-constructor): it is one

  /// Returns the text written so far.
  std::string text() const {
    std::string text;
    std::rewind(*this);
    for (int c; (c = std::fgetc(*this)) != EOF;) text += static_cast<char>(c);
    return text;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{std::tmpfile(), &std::fclose};
};

/// Splits a text into lines, or lines into cells.
inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (char c : text)
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  if (parts.back().empty()) parts.pop_back();
  return parts;
}

}  // namespace testing
