// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum {

struct MetricsFileOptions {
  std::filesystem::path path = {};  ///< `.csv`: comma-separated with a line of names; `.jsonl`: a JSON object a line
  bool append = false;              ///< go on with a file that is there; else it is begun anew
};

/// Numbers with names, a line at a time, for spreadsheets and plots.
///
///     ga::MetricsFile file({.path = "metrics.csv"});
///     for (int epoch = 0; epoch < 3; ++epoch) file.write({{"epoch", epoch}, {"loss", 0.5 / (epoch + 1)}});
///
/// A line is with the operating system when `write` returns, in one piece; one that was cut off, by a full disk say, is
/// ended before the next. All lines of a CSV file have the same names, in the same order. Doubles are written so that
/// reading gives the same bits; in JSON, which has no NaN and no infinity, these are null.
///
/// Throws `std::runtime_error` with the file's name where that cannot be, and for a name that would need quotes.
class MetricsFile {
 public:
  using Number = std::variant<std::int64_t, std::uint64_t, double>;
  struct Field {
    std::string name;
    Number number;
    Field(std::string its_name, std::signed_integral auto value)
        : name(std::move(its_name)), number(std::int64_t{value}) {}
    Field(std::string its_name, std::unsigned_integral auto value)  // or a flag: 0 or 1
        : name(std::move(its_name)), number(std::uint64_t{value}) {}
    Field(std::string its_name, double value) : name(std::move(its_name)), number(value) {}
  };
  using Fields = std::vector<Field>;

  explicit MetricsFile(MetricsFileOptions options);
  void write(const Fields& fields);

 private:
  [[noreturn]] void fail(std::string_view problem) const {
    throw std::runtime_error(fmt::format("MetricsFile: {}: {}", path_.string(), problem));
  }
  void look_at_what_is_there();
  void check(const Fields& fields) const;
  static std::string text_of(const Number& number);
  static std::string heading(const Fields& fields);
  static std::string csv(const Fields& fields);
  static std::string json(const Fields& fields);
  void put(const std::string& text);

  std::filesystem::path path_;
  bool is_csv_, is_torn_ = false;  // torn: the last line has no end
  std::string heading_;            // of a CSV file
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
};

inline MetricsFile::MetricsFile(MetricsFileOptions options)
    : path_(std::move(options.path)), is_csv_(path_.extension() == ".csv") {
  if (!is_csv_ && path_.extension() != ".jsonl") fail("the name must end in .csv or .jsonl");
  file_.reset(std::fopen(path_.c_str(), options.append ? "a+b" : "wb"));
  if (!file_) fail(std::strerror(errno));
  std::setvbuf(file_.get(), nullptr, _IONBF, 0);  // else what could not be written would be tried again, and come twice
  if (options.append) look_at_what_is_there();
}

inline void MetricsFile::look_at_what_is_there() {
  for (int c = 0; is_csv_ && (c = std::fgetc(file_.get())) != EOF && (c != '\n' || heading_.empty());)
    if (c != '\n') heading_ += static_cast<char>(c);
  is_torn_ = std::fseek(file_.get(), -1, SEEK_END) == 0 && std::fgetc(file_.get()) != '\n';
  std::fseek(file_.get(), 0, SEEK_END);  // C wants one between reading and writing
}

inline void MetricsFile::write(const Fields& fields) {
  check(fields);
  auto line = (is_csv_ ? csv(fields) : json(fields)) + '\n';
  if (!is_csv_) return put(line);
  const auto names = heading(fields);
  if (heading_.empty()) line = names + '\n' + line;
  if (!heading_.empty() && names != heading_) fail(fmt::format("its columns are '{}', got '{}'", heading_, names));
  put(line);
  heading_ = names;
}

inline void MetricsFile::check(const Fields& fields) const {
  if (fields.empty()) fail("a line must have a field");
  std::set<std::string_view> names;
  for (auto& [name, number] : fields) {
    const auto is_plain = [](unsigned char c) { return c >= ' ' && c != ',' && c != '"' && c != '\\'; };
    if (name.empty() || !std::all_of(name.begin(), name.end(), is_plain))
      fail(fmt::format("a name must have no comma, quote, backslash or control character, got '{}'", name));
    if (!names.insert(name).second) fail(fmt::format("two fields of a line are named '{}'", name));
  }
}

inline std::string MetricsFile::text_of(const Number& number) {
  const auto* const real = std::get_if<double>(&number);
  if (real && std::isnan(*real)) return "nan";  // never -nan, which is what 0.0 / 0.0 is to fmt
  return std::visit([](auto value) { return fmt::format("{}", value); }, number);
}

inline std::string MetricsFile::heading(const Fields& fields) {
  std::string text;
  for (auto& field : fields) text += (text.empty() ? "" : ",") + field.name;
  return text;
}

inline std::string MetricsFile::csv(const Fields& fields) {
  std::string text;
  for (auto& field : fields) text += (text.empty() ? "" : ",") + text_of(field.number);
  return text;
}

inline std::string MetricsFile::json(const Fields& fields) {
  std::string text = "{";
  for (auto& [name, number] : fields) {
    const auto* const real = std::get_if<double>(&number);
    const bool is_null = real && !std::isfinite(*real);
    text += fmt::format("{}\"{}\": {}", text.size() == 1 ? "" : ", ", name, is_null ? "null" : text_of(number));
  }
  return text + "}";
}

/// In one piece, so that a line is there or not.
inline void MetricsFile::put(const std::string& text) {
  const auto whole = (is_torn_ ? "\n" : "") + text;
  const auto written = std::fwrite(whole.data(), 1, whole.size(), file_.get());
  if (written > 0) is_torn_ = written < whole.size();
  if (written < whole.size()) fail(std::strerror(errno));
}

}  // namespace gradaccum
