// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/text_file.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bloom {

/// Limits the memory that an untrusted file can take.
struct CsvLimits {
  std::uint64_t file_bytes = std::uint64_t{1} << 30;
  std::size_t field_bytes = std::size_t{1} << 20;
  std::size_t columns = 1000;
  std::int64_t rows = 10'000'000;  ///< after the column names
};

/// Cuts the bytes of a CSV file (RFC 4180) into rows of fields.
///
///     CsvReader reader(bytes, "reviews.csv");
///     std::vector<std::string> row;
///     while (reader.next(row)) std::cout << reader.line() << ": " << row[0] << '\n';
///
/// A field in quotes may hold commas, line ends and doubled quotes. Lines end with LF or CRLF; the last may lack its
/// end. A byte order mark is skipped, and so are empty lines. Fields must be UTF-8.
/// Anything else is an error that names the file and the line where the row begins.
class CsvReader {
 public:
  /// `name` is for errors. The bytes must outlive the reader.
  CsvReader(std::string_view bytes, std::string name, CsvLimits limits = {})
      : bytes_(bytes), name_(std::move(name)), limits_(limits) {
    if (bytes_.substr(0, 3) == "\xEF\xBB\xBF") at_ = 3;
  }

  /// Reads the next row into `row`, whose memory is reused; returns false at the end.
  bool next(std::vector<std::string>& row) {
    begin_row();
    if (at_ == bytes_.size()) return false;
    std::size_t columns = 0;
    do {
      if (columns == limits_.columns) fail("must have at most ", limits_.columns, " columns, got more");
      if (columns == row.size()) row.emplace_back();
      read_field(row[columns++]);
    } while (take(','));
    row.resize(columns);
    if (at_ < bytes_.size() && !take_line_end()) fail("a carriage return must be followed by a line feed or be quoted");
    return true;
  }

  /// Returns the line where the last row began, counted from 1.
  std::int64_t line() const { return line_; }

  /// Throws an error about the last row.
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    data_error(name_ + ": line " + std::to_string(line_), parts...);
  }

 private:
  void begin_row() {
    while (take_line_end()) {
    }
    line_ += std::count(bytes_.begin() + static_cast<std::ptrdiff_t>(row_begin_),
                        bytes_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    row_begin_ = at_;
  }

  void read_field(std::string& field) {
    field.clear();
    if (take('"')) {
      read_quoted(field);
    } else {
      auto end = at_;
      while (end < bytes_.size() && !ends_plain_field(bytes_[end])) ++end;
      append_until(end, field);
      if (at_ < bytes_.size() && bytes_[at_] == '"')
        fail("a field with a quote must be in quotes, got ", shown(field), "\"");
    }
    if (field.find('\0') != field.npos) fail("must be text, got a zero byte (is it UTF-16, or compressed?)");
    check_utf8(field, name_ + ": line " + std::to_string(line_));
  }

  /// Reads from after the opening quote to after the closing one.
  void read_quoted(std::string& field) {
    for (bool is_doubled = true; is_doubled;) {
      const auto quote = bytes_.find('"', at_);
      if (quote == bytes_.npos) fail("a quoted field must be closed by a quote, but the file ends");
      is_doubled = quote + 1 < bytes_.size() && bytes_[quote + 1] == '"';
      append_until(is_doubled ? quote + 1 : quote, field);  // a doubled quote is one quote of text
      ++at_;
    }
    if (at_ < bytes_.size() && !ends_plain_field(bytes_[at_]))
      fail("a closing quote must be followed by a comma or a line end, got ", shown(bytes_.substr(at_, 20)));
  }

  static bool ends_plain_field(char c) { return c == ',' || c == '\n' || c == '\r' || c == '"'; }

  void append_until(std::size_t end, std::string& field) {
    const auto size = field.size() + (end - at_);
    if (size > limits_.field_bytes)
      fail("a field must have at most ", limits_.field_bytes, " bytes, got ", size, " or more");
    field.append(bytes_.substr(at_, end - at_));
    at_ = end;
  }

  bool take(char c) { return at_ < bytes_.size() && bytes_[at_] == c ? ++at_, true : false; }

  bool take_line_end() {
    if (bytes_.substr(at_, 2) == "\r\n") return at_ += 2, true;
    return take('\n');
  }

  std::string_view bytes_;
  std::string name_;
  CsvLimits limits_;
  std::size_t at_ = 0;         // index of the next byte
  std::size_t row_begin_ = 0;  // lines are counted up to here
  std::int64_t line_ = 1;
};

}  // namespace bloom
