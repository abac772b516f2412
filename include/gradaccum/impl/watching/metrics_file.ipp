// SPDX-License-Identifier: Apache-2.0
// Writes lines of numbers as CSV or JSON, and removes lines of a run that is resumed.
#pragma once

#include <gradaccum/metrics_file.hpp>

#include <gradaccum/detail/io/files.hpp>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <stdexcept>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

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

  ~File() {
    if (!file) return;
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("the last lines were not written: ", error.what());
    }
    std::fclose(file);
  }

  [[noreturn]] void fail(std::string_view problem) const {
    throw std::runtime_error(fmt::format("MetricsFile: {}: {}", path.string(), problem));
  }

  void open(bool append) {
    if (!is_csv && path.extension() != ".jsonl") fail("the name must end in .csv or .jsonl");
    detail::make_directory(path.parent_path());
    file = detail::open_stream(path, append ? "a+b" : "w+b");
    if (!file) fail(std::strerror(errno));
    std::setvbuf(file, nullptr, _IONBF, 0);  // unbuffered: stdio would retry a failed write, and repeat a part
    if (append) look_at_what_is_there();
  }

  void look_at_what_is_there() {
    for (int c = 0; is_csv && (c = std::fgetc(file)) != EOF && (c != '\n' || heading.empty());)
      if (c != '\n') heading += static_cast<char>(c);
    is_torn = std::fseek(file, -1, SEEK_END) == 0 && std::fgetc(file) != '\n';
    std::fseek(file, 0, SEEK_END);  // C requires a seek between reading and writing
  }

  void check(const Fields& fields) {
    if (fields.empty()) fail("a line must have a field");
    if (std::ranges::equal(fields, known_names, {}, &Field::name)) return;
    std::vector<std::string> names;
    for (auto& [name, number] : fields) {
      const auto is_plain = [](unsigned char c) { return c >= ' ' && c != ',' && c != '"' && c != '\\'; };
      if (name.empty() || !std::all_of(name.begin(), name.end(), is_plain))
        fail(fmt::format("a name must have no comma, quote, backslash or control character, got '{}'", name));
      if (std::find(names.begin(), names.end(), name) != names.end())
        fail(fmt::format("two fields of a line are named '{}'", name));
      names.push_back(name);
    }
    const auto columns = c10::Join(",", names);
    if (!heading.empty() && columns != heading) fail(fmt::format("its columns are '{}', got '{}'", heading, columns));
    known_names = std::move(names);
  }

  void put(const std::string& text) {
    waiting += text;
    if (Clock::now() - flushed >= flush_every) flush();
  }

  /// Writes all waiting lines in one piece. A failed write is not retried, since part of it may be in the file.
  void flush() {
    flushed = Clock::now();
    if (waiting.empty()) return;
    const detail::NoWriteSignals no_signals;
    const auto whole = std::string(is_torn ? "\n" : "") + std::exchange(waiting, {});
    const auto written = std::fwrite(whole.data(), 1, whole.size(), file);
    if (written > 0) is_torn = whole[written - 1] != '\n';
    if (written < whole.size()) fail(std::strerror(errno));
  }

  std::string text() const {
    std::string all;
    std::fseek(file, 0, SEEK_SET);
    std::array<char, 1 << 16> part;
    for (std::size_t read = 0; (read = std::fread(part.data(), 1, part.size(), file)) > 0;)
      all.append(part.data(), read);
    std::fseek(file, 0, SEEK_END);
    return all;
  }

  /// Returns nullopt if the line does not have the number.
  std::optional<double> number_of(std::string_view name, std::string_view line) const {
    std::size_t at = 0;
    if (is_csv) {
      const auto columns = ',' + heading + ',';
      const auto column = columns.find(fmt::format(",{},", name));
      if (column == columns.npos) return {};
      for (auto before = std::ranges::count(columns.substr(0, column), ','); before > 0 && at != line.npos; --before)
        at = line.find(',', at) == line.npos ? line.npos : line.find(',', at) + 1;
    } else {
      const auto key = fmt::format("\"{}\": ", name);
      at = line.find(key);
      if (at != line.npos) at += key.size();
    }
    if (at == line.npos) return {};
    const auto cell = line.substr(at, line.find_first_of(",}", at) - at);
    double number = 0;
    const auto end = std::from_chars(cell.data(), cell.data() + cell.size(), number).ptr;
    return end == cell.data() ? std::nullopt : std::optional(number);
  }

  std::string line_of(const Fields& fields) const {
    std::string line;
    const char* separator = is_csv ? "" : "{";
    for (auto& [name, number] : fields) {
      line += std::exchange(separator, is_csv ? "," : ", ");
      if (!is_csv) fmt::format_to(std::back_inserter(line), "\"{}\": ", name);
      const auto* const real = std::get_if<double>(&number);
      if (real && !detail::is_finite(*real))  // never "-nan", as fmt prints 0.0 / 0.0
        line += !is_csv ? "null" : detail::is_nan(*real) ? "nan" : *real > 0 ? "inf" : "-inf";
      else
        std::visit([&](auto value) { fmt::format_to(std::back_inserter(line), "{}", value); }, number);
    }
    return line + (is_csv ? "\n" : "}\n");
  }
};

GRADACCUM_INLINE MetricsFile::MetricsFile(MetricsFileOptions options)
    : file_(new File{.path = std::move(options.path), .flush_every = options.flush_every},
            [](File* file) { delete file; }) {
  file_->open(options.append);
}

GRADACCUM_INLINE void MetricsFile::remove_lines_at_end(std::string_view name, double last, std::string_view without) {
  flush();
  const auto text = file_->text();
  std::size_t kept = file_->is_torn ? text.rfind('\n') + 1 : text.size();
  for (double next = std::numeric_limits<double>::infinity(); kept > 0;) {
    const auto begin = kept > 1 ? text.rfind('\n', kept - 2) + 1 : 0;  // npos + 1 is 0
    const auto line = std::string_view(text).substr(begin, kept - begin);
    const auto number = file_->number_of(name, line);
    if (!number || detail::is_nan(*number) || *number <= last || *number > next) break;
    if (!without.empty() && file_->number_of(without, line)) break;
    next = *number;
    kept = begin;
  }
  if (kept == text.size()) return;
  if (!detail::cut(file_->file, kept)) file_->fail(std::strerror(errno));
  std::fseek(file_->file, 0, SEEK_END);
  file_->is_torn = false;
}

GRADACCUM_INLINE void MetricsFile::write(const Fields& fields) {
  auto& file = *file_;
  file.check(fields);
  const auto line = file.line_of(fields);
  if (!file.is_csv || !file.heading.empty()) return file.put(line);
  auto names = c10::Join(",", file.known_names);
  file.put(names + '\n' + line);
  file.flush();
  file.heading = std::move(names);  // only after it has been written
}

GRADACCUM_INLINE void MetricsFile::flush() { file_->flush(); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
