// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/reviews.hpp"
#include "data/text_file.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace bloom {

inline constexpr std::uint64_t max_review_bytes = std::uint64_t{1} << 20;

namespace detail {

/// Lists a folder's *.txt by name, so that their order is the same on every machine.
inline std::vector<std::filesystem::path> texts_in(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    data_error(folder.string(), "must be a folder of reviews, *.txt, but there is none (see read_acl_imdb)");
  std::vector<std::filesystem::path> paths;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".txt") paths.push_back(entry->path());
  if (error) data_error(folder.string(), "must be readable, got '", error.message(), "'");
  if (paths.empty()) data_error(folder.string(), "must hold reviews, *.txt, but holds none");
  std::sort(paths.begin(), paths.end());
  return paths;
}

inline void read_texts(const std::filesystem::path& folder, std::int64_t label, Reviews& reviews) {
  for (const auto& path : texts_in(folder)) {
    if (std::filesystem::is_symlink(path)) data_error(path.string(), "must be a regular file, got a symbolic link");
    auto text = read_text_file(path, max_review_bytes);
    if (text.find('\0') != text.npos) data_error(path.string(), "must be text, got a zero byte");
    check_utf8(text, path.string());
    if (is_blank(text))
      ++reviews.skipped;
    else
      reviews.rows.push_back({std::move(text), label});
  }
}

}  // namespace detail

/// Reads the folders of the Large Movie Review Dataset (aclImdb): `neg` (label 0) and `pos` (label 1) with one review
/// per file, *.txt. Reads `train` and `test`, or only the given one.
///
///     const auto all = bloom::read_acl_imdb("aclImdb");          // 50,000
///     const auto train = bloom::read_acl_imdb("aclImdb/train");  // 25,000
///
/// Files are UTF-8, and are sorted by name. Those with only white space are skipped and counted.
/// @throws std::runtime_error naming the file or folder, the requirement and the value.
inline Reviews read_acl_imdb(const std::filesystem::path& directory) {
  const bool is_part = std::filesystem::exists(directory / "neg") || std::filesystem::exists(directory / "pos");
  const auto parts = is_part ? std::vector{directory} : std::vector{directory / "train", directory / "test"};
  Reviews reviews;
  for (const auto& part : parts) {
    detail::read_texts(part / "neg", 0, reviews);
    detail::read_texts(part / "pos", 1, reviews);
  }
  if (reviews.rows.empty())
    data_error(directory.string(), "must have a review with text, got ", reviews.skipped, " without");
  return reviews;
}

}  // namespace bloom
