// SPDX-License-Identifier: Apache-2.0
//
// Reads arbitrary bytes as a CSV file of reviews, and writes the result.

#include "data/read_csv.hpp"
#include "data/write_csv.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

using namespace bloom;

namespace {

const std::string path = "a/file";

void require(bool holds) {
  if (!holds) std::abort();
}

/// Reads a file. A result is within the limits, and can be written and read back equal.
void read(std::string_view bytes, const CsvLimits& limits) {
  try {
    const auto reviews = parse_csv(bytes, path, limits);
    require(static_cast<std::int64_t>(reviews.rows.size()) + reviews.skipped <= limits.rows);
    std::size_t text_bytes = 0;
    for (const auto& row : reviews.rows) {
      require(row.text.size() <= limits.field_bytes && row.label >= 0);
      text_bytes += row.text.size();
    }
    require(text_bytes <= bytes.size());
    const auto again = parse_csv(format_csv(reviews.rows, "its copy"), "its copy");
    require(again.rows == reviews.rows && again.skipped == 0);
  } catch (const std::runtime_error& error) {
    require(std::string_view(error.what()).starts_with(path + ": "));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read(bytes, {});
  read(bytes, {.field_bytes = 12, .columns = 3, .rows = 2});
  return 0;
}
