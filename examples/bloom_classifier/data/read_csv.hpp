// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/csv_reader.hpp"
#include "data/reviews.hpp"
#include "data/text_file.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bloom {

namespace detail {

inline void check_column_names(const CsvReader& reader, std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  const auto twice =
      std::adjacent_find(names.begin(), names.end(), [](const auto& a, const auto& b) { return a == b && !a.empty(); });
  if (twice != names.end()) reader.fail("column names must differ, got ", shown(*twice), " twice");
}

/// Finds the column with the first of the wanted names that occurs.
inline std::size_t find_column(const CsvReader& reader, const std::vector<std::string>& names,
                               std::initializer_list<const char*> wanted) {
  for (const auto* name : wanted) {
    const auto at = std::find(names.begin(), names.end(), name);
    if (at != names.end()) return static_cast<std::size_t>(at - names.begin());
  }
  std::string all, got;
  for (const auto* name : wanted) all += (all.empty() ? "'" : " or '") + std::string(name) + "'";
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 20); ++i) got += (i ? ", " : "") + shown(names[i]);
  if (names.size() > 20) got += ", ...";
  reader.fail("the first row must name a column ", all, ", got ", got);
}

inline std::int64_t label_of(const CsvReader& reader, std::string_view field) {
  if (field == "negative") return 0;
  if (field == "positive") return 1;
  std::int64_t label = -1;  // unchanged if the number is too large
  const auto* end = field.data() + field.size();
  if (std::from_chars(field.data(), end, label).ptr != end || label < 0)
    reader.fail("a label must be an integer from 0 on, or negative or positive, got ", shown(field));
  return label;
}

}  // namespace detail

/// Selects the columns to read. Without labels all are 0.
enum class Columns { text_and_label, text };

/// Parses the bytes of a CSV file; `name` is for errors.
inline Reviews parse_csv(std::string_view bytes, const std::string& name, const CsvLimits& limits = {},
                         Columns wanted = Columns::text_and_label) {
  CsvReader reader(bytes, name, limits);
  std::vector<std::string> row;
  if (!reader.next(row)) data_error(name, "must begin with a row of column names, but is empty");
  detail::check_column_names(reader, row);
  const auto columns = row.size();
  const auto text = detail::find_column(reader, row, {"text", "review"});
  const bool has_label = wanted == Columns::text_and_label;
  const auto label = has_label ? detail::find_column(reader, row, {"label", "sentiment"}) : text;

  Reviews reviews;
  for (std::int64_t count = 1; reader.next(row); ++count) {
    if (count > limits.rows) reader.fail("a file must have at most ", limits.rows, " rows, got more");
    if (row.size() != columns)
      reader.fail("must have ", columns, " columns as the first row has, got ", row.size(),
                  " (a field with commas must be in quotes)");
    if (is_blank(row[text])) {
      ++reviews.skipped;
    } else {
      const auto value = has_label ? detail::label_of(reader, row[label]) : 0;
      reviews.rows.push_back({std::move(row[text]), value});
    }
  }
  if (reviews.rows.empty()) data_error(name, "must have a row with text, got ", reviews.skipped, " without");
  return reviews;
}

/// Reads a CSV file (RFC 4180, see CsvReader) with the columns `text` and `label`, in any order and among others.
///
///     const auto reviews = bloom::read_csv("reviews.csv");
///     std::cout << reviews.rows.size() << " reviews, " << reviews.skipped << " without text\n";
///
/// The columns of Kaggle's "IMDB Dataset.csv" also work: `review` and `sentiment`, which is negative (0) or positive
/// (1). A row whose text is only white space is skipped and counted, whether or not its label is valid.
/// @throws std::runtime_error naming the file, the line, the requirement and the value.
inline Reviews read_csv(const std::filesystem::path& path, const CsvLimits& limits = {},
                        Columns wanted = Columns::text_and_label) {
  return parse_csv(read_text_file(path, limits.file_bytes), path.string(), limits, wanted);
}

}  // namespace bloom
