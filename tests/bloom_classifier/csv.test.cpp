// SPDX-License-Identifier: Apache-2.0

#include "csv_values.hpp"
#include "data/csv_reader.hpp"
#include "data/random.hpp"
#include "data/read_csv.hpp"
#include "data/write_csv.hpp"
#include "reviews_output.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

using namespace bloom;
using namespace std::string_literals;

namespace {

using Rows = csv_values::Rows;

Rows rows_of(const std::string& bytes, const CsvLimits& limits = {}) {
  CsvReader reader(bytes, "file", limits);
  Rows rows;
  for (std::vector<std::string> row; reader.next(row);) rows.push_back(row);
  return rows;
}

std::string repeated(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

std::vector<Review> reviews_of(const std::string& bytes) { return parse_csv(bytes, "file").rows; }

std::vector<Review> expected_rows() {
  std::vector<Review> rows;
  for (const auto& [text, label] : csv_values::rows) rows.push_back({text, label});
  return rows;
}

}  // namespace

TEST_CASE("CSV: fields, quotes and line ends") {
  REQUIRE(rows_of("a,b\nc,d\n") == Rows{{"a", "b"}, {"c", "d"}});
  REQUIRE(rows_of("a,b\r\nc,d") == Rows{{"a", "b"}, {"c", "d"}});
  REQUIRE(rows_of("\xEF\xBB\xBF"
                  "a,b") == Rows{{"a", "b"}});
  REQUIRE(rows_of("\xEF\xBB\xBF\"a\",\xEF\xBB\xBF") == Rows{{"a", "\xEF\xBB\xBF"}});
  REQUIRE(rows_of("\"a,b\",\"c\"\"d\"") == Rows{{"a,b", "c\"d"}});
  REQUIRE(rows_of("\"\"\"\",\"\"") == Rows{{"\"", ""}});
  REQUIRE(rows_of("\"a\nb\r\nc\rd\",e\n") == Rows{{"a\nb\r\nc\rd", "e"}});
  REQUIRE(rows_of(" a , b ") == Rows{{" a ", " b "}});
  REQUIRE(rows_of("a,\n,b\n") == Rows{{"a", ""}, {"", "b"}});
  REQUIRE(rows_of(",,") == Rows{{"", "", ""}});
  REQUIRE(rows_of("\n\r\na,b\n\n\nc,d\n\n") == Rows{{"a", "b"}, {"c", "d"}});
  REQUIRE(rows_of("\"\"\n") == Rows{std::vector<std::string>{""}});
  REQUIRE(rows_of("a\nb,c,d\ne,f") == Rows{std::vector<std::string>{"a"}, {"b", "c", "d"}, {"e", "f"}});
  for (const auto* nothing : {"", "\n", "\r\n\n", "\xEF\xBB\xBF"}) REQUIRE(rows_of(nothing).empty());
  REQUIRE(rows_of("caf\xC3\xA9,\xF0\x9F\x8E\xAC") == Rows{{"caf\xC3\xA9", "\xF0\x9F\x8E\xAC"}});
}

TEST_CASE("CSV: a row's line is its first, counted as editors do") {
  const std::string bytes = "\n\na,b\r\n\"1\n2\r\n3\",c\n\r\nd\n";
  CsvReader reader(bytes, "file");
  std::vector<std::string> row;
  for (const int line : {3, 4, 8}) {
    REQUIRE(reader.next(row));
    REQUIRE(reader.line() == line);
  }
  REQUIRE_FALSE(reader.next(row));
}

TEST_CASE("CSV: hostile bytes are errors that name the file, the line, the requirement and the value") {
  struct Hostile {
    std::string bytes, message;
  };
  const std::vector<Hostile> table = {
      {"", "file: must begin with a row of column names, but is empty"},
      {"\n\n", "file: must begin with a row of column names, but is empty"},
      {"text,label\n", "file: must have a row with text, got 0 without"},
      {"text,label\n,1\n \t,0\n", "file: must have a row with text, got 2 without"},
      {"text,label\na,1\n\"b\n\n,1\n", "file: line 3: a quoted field must be closed by a quote, but the file ends"},
      {"text,label\n\"", "file: line 2: a quoted field must be closed by a quote, but the file ends"},
      {"text,label\n\"\"\"", "file: line 2: a quoted field must be closed by a quote, but the file ends"},
      {"text,label\n\na 5\" disc,1\n", "file: line 3: a field with a quote must be in quotes, got 'a 5'\""},
      {"text,label\n \"a\",1\n", "file: line 2: a field with a quote must be in quotes, got ' '\""},
      {"text,label\n\"a\" b,1\n", "line 2: a closing quote must be followed by a comma or a line end, got ' b,1?'"},
      {"text,label\n\"a\nb\"c\"d\",1\n", "line 2: a closing quote must be followed by a comma or a line end, got 'c"},
      {"text,label\na\rb,1\n", "line 2: a carriage return must be followed by a line feed or be quoted"},
      {"text,label\na,1\r", "line 2: a carriage return must be followed by a line feed or be quoted"},
      {"text,label\ra,1\r", "line 1: a carriage return must be followed by a line feed or be quoted"},
      {"text,label\na,b,1\n", "line 2: must have 2 columns as the first row has, got 3 (a field with commas must be"},
      {"text,label\na,1\nb\n", "line 3: must have 2 columns as the first row has, got 1"},
      {"text,label\n,,\n", "line 2: must have 2 columns as the first row has, got 3"},
      {"text,label\na,1.0\n", "line 2: a label must be an integer from 0 on, or negative or positive, got '1.0'"},
      {"text,label\na,-1\n", "got '-1'"},
      {"text,label\na,+1\n", "got '+1'"},
      {"text,label\na, 1\n", "got ' 1'"},
      {"text,label\na,1 \n", "got '1 '"},
      {"text,label\na,0x1\n", "got '0x1'"},
      {"text,label\na,\n", "got ''"},
      {"text,label\na,nan\n", "got 'nan'"},
      {"text,label\na,Positive\n", "got 'Positive'"},
      {"text,label\na,9223372036854775808\n", "got '9223372036854775808'"},
      {"text,label\na,\"1\n\x1b[31m\"\n", "got '1??[31m'"},
      {"text,label\na," + std::string(100, '7') + "\n", "got '" + std::string(40, '7') + "...'"},
      {"text,label\na,x" + repeated("\xC3\xA9", 30) + "\n", "got 'x" + repeated("\xC3\xA9", 19) + "...'"},
      {"text\na\n", "line 1: the first row must name a column 'label' or 'sentiment', got 'text'"},
      {"\nid,Text,label\n", "line 2: the first row must name a column 'text' or 'review', got 'id', 'Text', 'label'"},
      {"text, label\n", "must name a column 'label' or 'sentiment', got 'text', ' label'"},
      {"a film,1\n", "must name a column 'text' or 'review', got 'a film', '1'"},
      {"0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21", "got '0', '1', '2',"},
      {"0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21", ", '18', '19', ..."},
      {"text;label\na;1\n", "must name a column 'text' or 'review', got 'text;label'"},
      {"text,label,text\n", "line 1: column names must differ, got 'text' twice"},
      {"text,label,x,y,x\n", "line 1: column names must differ, got 'x' twice"},
      {"text,label\n\0a,1\n"s, "line 2: must be text, got a zero byte (is it UTF-16, or compressed?)"},
      {"text,label\n\"a\0\",1\n"s, "line 2: must be text, got a zero byte"},
      {"text,label\na,1\na caf\xE9,1\n",
       "file: line 3: must be UTF-8, got 'a caf\xEF\xBF\xBD'; iconv -f latin1 -t utf-8"},
      {"text,label\n\"\xC3\xA9\nb\xC3\",1\n", "line 2: must be UTF-8"},
      {"text,label,other\na,1,\xED\xA0\x80\n", "line 2: must be UTF-8"},
      {"t\xE9xt,label\na,1\n", "line 1: must be UTF-8"},
      {"\xFF\xFEt\0e\0"s, "line 1: must be text, got a zero byte"},
  };
  for (const auto& hostile : table) {
    CAPTURE(hostile.bytes);
    REQUIRE_ERROR(hostile.message, parse_csv(hostile.bytes, "file"));
    REQUIRE_ERROR("file: ", parse_csv(hostile.bytes, "file"));
  }
}

TEST_CASE("CSV: columns in any order, among others, and those of Kaggle's file") {
  const std::vector<Review> rows = {{"a", 1}, {"b", 0}};
  REQUIRE(reviews_of("text,label\na,1\nb,0\n") == rows);
  REQUIRE(reviews_of("label,text\n1,a\n0,b\n") == rows);
  REQUIRE(reviews_of(",id,label,text,,\n7,8,1,a,x,y\n9,9,0,b,,\n") == rows);
  REQUIRE(reviews_of("\xEF\xBB\xBF\"text\",\"label\"\r\na,1\r\n\"b\",\"0\"\r\n") == rows);
  REQUIRE(reviews_of("review,sentiment\na,positive\nb,negative\n") == rows);
  REQUIRE(reviews_of("review,label,text\nx,1,a\ny,0,b\n") == rows);  // `text` takes precedence over `review`
  REQUIRE(reviews_of("text,label\na,9223372036854775807\n") == std::vector<Review>{{"a", 9223372036854775807}});
}

TEST_CASE("CSV: reads only texts, with labels or without") {
  const std::vector<Review> rows = {{"a, b", 0}, {"c", 0}};
  REQUIRE(parse_csv("id,text\n1,\"a, b\"\n2,c\n", "file", {}, Columns::text).rows == rows);
  REQUIRE(parse_csv("text,label\n\"a, b\",no number\nc,1\n", "file", {}, Columns::text).rows == rows);
  REQUIRE_ERROR("must name a column 'text' or 'review'", parse_csv("id,words\n1,a\n", "file", {}, Columns::text));
  REQUIRE_ERROR("must name a column 'label' or 'sentiment'", parse_csv("id,text\n1,a\n", "file"));
}

TEST_CASE("CSV: rows without text are skipped and counted, with any label") {
  const auto reviews = parse_csv("text,label\n,1\na,1\n\" \r\n\t\",\n,\n\xC2\xA0,0\n", "file");
  REQUIRE(reviews.rows == std::vector<Review>{{"a", 1}, {"\xC2\xA0", 0}});  // a no-break space is text
  REQUIRE(reviews.skipped == 3);
}

TEST_CASE("CSV: limits, at the limit and above it") {
  const std::string bytes = "text,label\nabcdef,1\n\"g\"\"h\",0\n";
  REQUIRE(parse_csv(bytes, "file", {.field_bytes = 6, .columns = 2, .rows = 2}).rows.size() == 2);
  REQUIRE_ERROR("file: line 2: a field must have at most 5 bytes, got 6", parse_csv(bytes, "file", {.field_bytes = 5}));
  REQUIRE_ERROR("file: line 1: must have at most 1 columns, got more", parse_csv(bytes, "file", {.columns = 1}));
  REQUIRE_ERROR("file: line 3: a file must have at most 1 rows, got more", parse_csv(bytes, "file", {.rows = 1}));
  REQUIRE(rows_of("\"a\"\"b\"", {.field_bytes = 3}) == Rows{std::vector<std::string>{"a\"b"}});
  REQUIRE_ERROR("at most 2 bytes, got 3", rows_of("\"a\"\"b\"", {.field_bytes = 2}));
  REQUIRE_ERROR("at most 1048576 bytes", rows_of(std::string((1 << 20) + 1, 'a')));
  REQUIRE_ERROR("at most 1000 columns", rows_of(std::string(1000, ',')));

  const testing::Directory directory;
  testing::write_text(directory / "a.csv", bytes);
  REQUIRE(read_csv(directory / "a.csv", {.file_bytes = bytes.size()}).rows.size() == 2);
  REQUIRE_ERROR("a.csv: must have at most 28 bytes, got 29", read_csv(directory / "a.csv", {.file_bytes = 28}));
  // Refused files take no memory: there is not enough for this one.
  std::filesystem::resize_file(directory / "a.csv", std::uint64_t{1} << 40);
  REQUIRE_ERROR("must have at most 1073741824 bytes, got 1099511627776", read_csv(directory / "a.csv"));
}

TEST_CASE("CSV: paths that are not regular files") {
  const testing::Directory directory;
  REQUIRE_ERROR("no.csv: must exist, but there is no such file", read_csv(directory / "no.csv"));
  std::filesystem::create_directory(directory / "folder");
  REQUIRE_ERROR("folder: must be a regular file, but is not", read_csv(directory / "folder"));
  REQUIRE(mkfifo((directory / "pipe").c_str(), 0600) == 0);
  REQUIRE_ERROR("pipe: must be a regular file, but is not", read_csv(directory / "pipe"));
  testing::write_text(directory / "a.csv", "text,label\na,x\n");
  REQUIRE_ERROR((directory / "a.csv").string() + ": line 2: a label must", read_csv(directory / "a.csv"));
  std::filesystem::create_symlink("a.csv", directory / "link.csv");
  testing::write_text(directory / "a.csv", "text,label\na,1\n");
  REQUIRE(read_csv(directory / "link.csv").rows == std::vector<Review>{{"a", 1}});
}

TEST_CASE("CSV: writes the same bytes as Python") {
  const auto rows = expected_rows();
  REQUIRE(rows.size() == 40);
  REQUIRE(reviews_of(csv_values::written_as_ours) == rows);
  REQUIRE(reviews_of(csv_values::written_minimal) == rows);
  REQUIRE(reviews_of(csv_values::written_all_lf) == rows);
  REQUIRE(reviews_of(csv_values::written_label_first) == rows);
  REQUIRE(format_csv(rows, "file") == csv_values::written_as_ours);
}

TEST_CASE("CSV: reads the same rows as Python, except for errors that Python accepts") {
  int read = 0, errors = 0, stricter = 0;
  for (const auto& hard : csv_values::hard) {
    CAPTURE(hard.text, hard.rows.has_value());
    Rows rows;
    const auto message = testing::error_of([&] { rows = rows_of(hard.text); });
    if (message.empty()) {
      REQUIRE(hard.rows == rows);
      ++read;
    } else if (hard.rows) {  // Python accepts a lone quote as text and a lone carriage return as a line end
      REQUIRE((testing::contains(message, "must be in quotes") || testing::contains(message, "carriage return")));
      ++stricter;
    } else {
      ++errors;
    }
  }
  REQUIRE(read > 50);
  REQUIRE(errors > 50);
  REQUIRE(stricter > 50);
}

TEST_CASE("CSV: written files are read back equal") {
  const std::vector<std::string> pieces = {"a",  "bc",           ",",        "\"", "\"\"", "\n", "\r\n",
                                           "\r", "\xEF\xBB\xBF", "\xC3\xA9", " "};
  Random random(1);
  const testing::Directory directory;
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<Review> rows(1 + random.below(20));
    for (auto& [text, label] : rows) {
      for (auto i = random.below(12); i > 0; --i) text += pieces[random.below(pieces.size())];
      while (is_blank(text)) text += static_cast<char>(1 + random.below(127));
      label = static_cast<std::int64_t>(random.bits() >> 1);
    }
    write_csv(directory / "a.csv", rows);
    const auto again = read_csv(directory / "a.csv");
    REQUIRE(again.rows == rows);
    REQUIRE(again.skipped == 0);
  }
}

TEST_CASE("CSV: texts that could not be read back are not written") {
  const testing::Directory directory;
  const auto path = directory / "a.csv";
  REQUIRE_ERROR(path.string() + ": must be UTF-8, got 'caf\xEF\xBF\xBD'", write_csv(path, {{"caf\xE9", 1}}));
  REQUIRE_ERROR("a.csv: a review must have text, got ''", write_csv(path, {{"a", 1}, {"", 1}}));
  REQUIRE_ERROR("a review must have text, got ' ?'", write_csv(path, {{" \n", 1}}));
  REQUIRE_ERROR("a text must have no zero byte, got 'a?b'", write_csv(path, {{"a\0b"s, 1}}));
  REQUIRE_ERROR("a label must be an integer from 0 on, got -1", write_csv(path, {{"a", -1}}));
  REQUIRE_FALSE(std::filesystem::exists(path));
  REQUIRE_ERROR("must be writable, got 'No such file", write_csv(directory / "none" / "a.csv", {{"a", 1}}));
  REQUIRE_ERROR("must be writable, got 'No space", write_csv("/dev/full", {{"a", 1}}));
}
