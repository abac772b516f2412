// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/text_file.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bloom {

/// A text and its class, counted from 0.
struct Review {
  std::string text;
  std::int64_t label = 0;
  bool operator==(const Review&) const = default;
};

struct Reviews {
  std::vector<Review> rows;
  std::int64_t skipped = 0;  ///< rows whose text is only white space
};

/// Throws unless all labels are below `label_count`. `name` is the rows' source, for the error.
inline void check_labels(const std::vector<Review>& rows, std::int64_t label_count, const std::string& name) {
  for (const auto& row : rows)
    if (row.label < 0 || row.label >= label_count)
      data_error(name, "labels must be 0 to ", label_count - 1, ", got ", row.label, " for ", shown(row.text));
}

/// Returns the number of labels. They must be 0, 1, ... without gaps, and at least two.
inline std::int64_t count_labels(const std::vector<Review>& rows, const std::string& name) {
  std::vector<bool> occurs(rows.size());  // a larger label implies a gap
  for (const auto& row : rows) {
    if (row.label < 0) data_error(name, "labels must not be negative, got ", row.label);
    if (const auto label = static_cast<std::size_t>(row.label); label < occurs.size()) occurs[label] = true;
  }
  const std::int64_t count = std::find(occurs.begin(), occurs.end(), false) - occurs.begin();
  for (const auto& row : rows)
    if (row.label > count)
      data_error(name, "each label from 0 to the largest must occur, got ", row.label, ", but no ", count);
  if (count < 2) data_error(name, "there must be at least two labels, got ", count);
  return count;
}

}  // namespace bloom
