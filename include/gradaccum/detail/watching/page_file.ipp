// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/page_file.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE PageFile::PageFile(std::filesystem::path path, std::chrono::duration<double> every)
    : path_(std::move(path)), part_(path_), every_(every) {
  part_ += ".part";
}

/// Throws where it could not be written whole, and leaves none behind then.
GRADACCUM_INLINE void write_part(const std::filesystem::path& part, const std::filesystem::path& path,
                                 std::string_view text) {
  auto* const file = std::fopen(part.c_str(), "wbe");
  if (!file) file_error(path, "must be written beside, as " + part.filename().string(), errno);
  const bool is_whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  const bool is_closed = std::fclose(file) == 0;
  if (is_whole && is_closed) return;
  const int why = is_whole ? errno : error;
  std::remove(part.c_str());
  file_error(path, "must be written", why);
}

GRADACCUM_INLINE void PageFile::check() const {
  if (std::filesystem::is_directory(path_)) file_error(path_, "must be a file", EISDIR);
  write_part(part_, path_, "");
  std::remove(part_.c_str());
}

GRADACCUM_INLINE bool PageFile::is_due() const { return !last_ || Clock::now() - *last_ >= every_; }

GRADACCUM_INLINE void PageFile::write(std::string_view text) {
  last_ = Clock::now();
  write_part(part_, path_, text);
  if (std::rename(part_.c_str(), path_.c_str()) == 0) return;
  const int error = errno;
  std::remove(part_.c_str());
  file_error(path_, "must be replaced (is as before)", error);
}

}  // namespace gradaccum::detail
