// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "data/acl_imdb.hpp"
#include "data/read_csv.hpp"
#include "data/split.hpp"
#include "options.hpp"

namespace bloom {

struct ReviewSplit {
  Split rows;
  std::int64_t num_labels = 2;
  std::int64_t skipped = 0;  // without text
};

/// Reads the CSV files or aclImdb folders that --train, --validation and --test name.
inline ReviewSplit read_reviews(const Options& options) {
  ReviewSplit all;
  const auto read = [&](const std::string& path) {
    auto reviews = std::filesystem::is_directory(path) ? read_acl_imdb(path) : read_csv(path);
    all.skipped += reviews.skipped;
    return std::move(reviews.rows);
  };
  auto rows = read(options.train);
  all.num_labels = count_labels(rows, options.train);
  if (options.test.empty()) {
    all.rows = split(std::move(rows), options.seed);
    return all;
  }
  all.rows = {std::move(rows), read(options.validation), read(options.test)};
  check_labels(all.rows.validation, all.num_labels, options.validation);
  check_labels(all.rows.test, all.num_labels, options.test);
  return all;
}

}  // namespace bloom
