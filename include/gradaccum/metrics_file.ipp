// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/metrics_file.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <sys/types.h>
#include <unistd.h>

namespace gradaccum {

namespace detail {

GRADACCUM_INLINE void append_number(std::string& text, const MetricsFile::Number& number) {
  const auto* const real = std::get_if<double>(&number);
  if (real && std::isnan(*real)) {  // never "-nan", which is how fmt prints 0.0 / 0.0
    text += "nan";
    return;
  }
  std::visit([&](auto value) { fmt::format_to(std::back_inserter(text), "{}", value); }, number);
}

std::string comma_separated(const MetricsFile::Fields& fields, const auto& append) {
  std::string text;
  for (auto& field : fields) {
    if (!text.empty()) text += ',';
    append(text, field);
  }
  return text;
}

GRADACCUM_INLINE std::string csv_heading(const MetricsFile::Fields& fields) {
  return comma_separated(fields, [](auto& text, auto& field) { text += field.name; });
}

GRADACCUM_INLINE std::string csv_line(const MetricsFile::Fields& fields) {
  return comma_separated(fields, [](auto& text, auto& field) { append_number(text, field.number); });
}

GRADACCUM_INLINE std::string json_line(const MetricsFile::Fields& fields) {
  std::string text = "{";
  for (auto& [name, number] : fields) {
    const auto* const real = std::get_if<double>(&number);
    fmt::format_to(std::back_inserter(text), "{}\"{}\": ", text.size() == 1 ? "" : ", ", name);
    if (real && !std::isfinite(*real))
      text += "null";
    else
      append_number(text, number);
  }
  return text + "}";
}

}  // namespace detail

struct MetricsFile::File {
  using Clock = std::chrono::steady_clock;

  std::filesystem::path path;
  std::chrono::duration<double> flush_every;
  bool is_csv = path.extension() == ".csv", is_torn = false;  // torn: the last line is not terminated
  std::string heading = {};                                   // for CSV files
  std::vector<std::string> known_names = {};                  // the names in the last line
  std::string waiting = {};                                   // whole lines
  Clock::time_point flushed = Clock::now();
  std::FILE* file = nullptr;

  ~File();
  [[noreturn]] void fail(std::string_view problem) const {
    throw std::runtime_error(fmt::format("MetricsFile: {}: {}", path.string(), problem));
  }
  void open(bool append);
  void look_at_what_is_there();
  void check(const Fields& fields);
  void put(const std::string& text);
  void flush();
  std::string text() const;
  std::optional<double> number_of(std::string_view name, std::string_view line) const;
};

GRADACCUM_INLINE MetricsFile::File::~File() {
  if (!file) return;
  try {
    flush();
  } catch (const std::exception&) {  // callers that need to know have called flush
  }
  std::fclose(file);
}

GRADACCUM_INLINE void MetricsFile::Close::operator()(File* file) const { delete file; }

GRADACCUM_INLINE MetricsFile::MetricsFile(MetricsFileOptions options)
    : file_(new File{.path = std::move(options.path), .flush_every = options.flush_every}) {
  file_->open(options.append);
}

GRADACCUM_INLINE void MetricsFile::File::open(bool append) {
  if (!is_csv && path.extension() != ".jsonl") fail("the name must end in .csv or .jsonl");
  file = std::fopen(path.c_str(), append ? "a+b" : "w+b");
  if (!file) fail(std::strerror(errno));
  std::setvbuf(file, nullptr, _IONBF, 0);  // unbuffered: stdio would retry a failed write, and repeat a part
  if (append) look_at_what_is_there();
}

GRADACCUM_INLINE void MetricsFile::File::look_at_what_is_there() {
  for (int c = 0; is_csv && (c = std::fgetc(file)) != EOF && (c != '\n' || heading.empty());)
    if (c != '\n') heading += static_cast<char>(c);
  is_torn = std::fseek(file, -1, SEEK_END) == 0 && std::fgetc(file) != '\n';
  std::fseek(file, 0, SEEK_END);  // C requires a seek between reading and writing
}

GRADACCUM_INLINE void MetricsFile::File::check(const Fields& fields) {
  if (fields.empty()) fail("a line must have a field");
  const auto is_known = [](const Field& field, const std::string& name) { return field.name == name; };
  if (std::equal(fields.begin(), fields.end(), known_names.begin(), known_names.end(), is_known)) return;
  std::set<std::string_view> names;
  for (auto& [name, number] : fields) {
    const auto is_plain = [](unsigned char c) { return c >= ' ' && c != ',' && c != '"' && c != '\\'; };
    if (name.empty() || !std::all_of(name.begin(), name.end(), is_plain))
      fail(fmt::format("a name must have no comma, quote, backslash or control character, got '{}'", name));
    if (!names.insert(name).second) fail(fmt::format("two fields of a line are named '{}'", name));
  }
  if (!heading.empty() && detail::csv_heading(fields) != heading)
    fail(fmt::format("its columns are '{}', got '{}'", heading, detail::csv_heading(fields)));
  known_names.clear();
  for (auto& field : fields) known_names.push_back(field.name);
}

GRADACCUM_INLINE void MetricsFile::File::put(const std::string& text) {
  waiting += text;
  if (Clock::now() - flushed >= flush_every) flush();
}

/// Writes all waiting lines in one piece. A failed write is not retried, since part of it may be in the file.
GRADACCUM_INLINE void MetricsFile::File::flush() {
  flushed = Clock::now();
  if (waiting.empty()) return;
  const auto whole = (is_torn ? "\n" : "") + std::exchange(waiting, {});
  const auto written = std::fwrite(whole.data(), 1, whole.size(), file);
  if (written > 0) is_torn = whole[written - 1] != '\n';
  if (written < whole.size()) fail(std::strerror(errno));
}

GRADACCUM_INLINE std::string MetricsFile::File::text() const {
  std::string all;
  std::fseek(file, 0, SEEK_SET);
  std::array<char, 1 << 16> part;
  for (std::size_t read = 0; (read = std::fread(part.data(), 1, part.size(), file)) > 0;) all.append(part.data(), read);
  std::fseek(file, 0, SEEK_END);
  return all;
}

/// Returns nullopt if the line does not have the number.
GRADACCUM_INLINE std::optional<double> MetricsFile::File::number_of(std::string_view name,
                                                                    std::string_view line) const {
  std::size_t at = 0;
  if (is_csv) {
    const auto columns = ',' + heading + ',';
    const auto column = columns.find(fmt::format(",{},", name));
    if (column == columns.npos) return {};
    for (auto before = std::count(columns.begin() + 1, columns.begin() + 1 + static_cast<std::ptrdiff_t>(column), ',');
         before > 0 && at != line.npos; --before)
      at = line.find(',', at) == line.npos ? line.npos : line.find(',', at) + 1;
  } else {
    const auto key = fmt::format("\"{}\": ", name);
    at = line.find(key);
    if (at != line.npos) at += key.size();
  }
  if (at == line.npos) return {};
  const std::string cell(line.substr(at, line.find_first_of(",}", at) - at));
  char* end = nullptr;
  const double number = std::strtod(cell.c_str(), &end);
  return end == cell.c_str() ? std::nullopt : std::optional(number);
}

GRADACCUM_INLINE void MetricsFile::remove_lines_at_end(std::string_view name, double last, std::string_view without) {
  flush();
  const auto text = file_->text();
  std::size_t kept = file_->is_torn ? text.rfind('\n') + 1 : text.size();
  for (double next = std::numeric_limits<double>::infinity(); kept > 0;) {
    const auto begin = kept > 1 ? text.rfind('\n', kept - 2) + 1 : 0;  // npos + 1 is 0
    const auto line = std::string_view(text).substr(begin, kept - begin);
    const auto number = file_->number_of(name, line);
    if (!number || !(*number > last) || *number > next) break;
    if (!without.empty() && file_->number_of(without, line)) break;
    next = *number;
    kept = begin;
  }
  if (kept == text.size()) return;
  if (::ftruncate(::fileno(file_->file), static_cast<off_t>(kept)) != 0) file_->fail(std::strerror(errno));
  std::fseek(file_->file, 0, SEEK_END);
  file_->is_torn = false;
}

GRADACCUM_INLINE void MetricsFile::write(const Fields& fields) {
  auto& file = *file_;
  file.check(fields);
  const auto line = (file.is_csv ? detail::csv_line(fields) : detail::json_line(fields)) + '\n';
  if (!file.is_csv || !file.heading.empty()) return file.put(line);
  const auto names = detail::csv_heading(fields);
  file.put(names + '\n' + line);
  file.flush();
  file.heading = names;  // only after it has been written
}

GRADACCUM_INLINE void MetricsFile::flush() { file_->flush(); }

}  // namespace gradaccum
