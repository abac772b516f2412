// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
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
/// A line is with the operating system when `write` returns, as a whole. All lines of a CSV file have the same names,
/// in the same order. Doubles are written so that reading gives the same bits; in JSON, which has no NaN, it is null.
///
/// Throws `std::runtime_error` with the file's name where that cannot be.
class MetricsFile {
 public:
  using Number = std::variant<std::int64_t, double>;
  struct Field {
    std::string name;
    Number number;
    Field(std::string its_name, std::integral auto value) : name(std::move(its_name)), number(std::int64_t(value)) {}
    Field(std::string its_name, double value) : name(std::move(its_name)), number(value) {}
  };

  explicit MetricsFile(MetricsFileOptions options);
  void write(const std::vector<Field>& fields);

 private:
  [[noreturn]] void fail(std::string_view problem) const {
    throw std::runtime_error(fmt::format("MetricsFile: {}: {}", path_.string(), problem));
  }
  static std::string heading(const std::vector<Field>& fields);
  static std::string csv(const std::vector<Field>& fields);
  static std::string json(const std::vector<Field>& fields);
  void put(std::string line);

  std::filesystem::path path_;
  bool is_csv_;
  std::string heading_;  // of a CSV file
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> file_;
};

inline MetricsFile::MetricsFile(MetricsFileOptions options)
    : path_(std::move(options.path)), is_csv_(path_.extension() == ".csv") {
  if (!is_csv_ && path_.extension() != ".jsonl") fail("the name must end in .csv or .jsonl");
  if (options.append && is_csv_) std::getline(std::ifstream(path_) >> std::ws, heading_);
  file_.reset(std::fopen(path_.c_str(), options.append ? "ab" : "wb"));
  if (!file_) fail(std::strerror(errno));
}

inline void MetricsFile::write(const std::vector<Field>& fields) {
  if (is_csv_) {
    const auto names = heading(fields);
    if (heading_.empty()) put(heading_ = names);
    if (names != heading_) fail(fmt::format("its columns are '{}', got '{}'", heading_, names));
  }
  put(is_csv_ ? csv(fields) : json(fields));
}

inline std::string MetricsFile::heading(const std::vector<Field>& fields) {
  std::string text;
  for (auto& field : fields) text += (text.empty() ? "" : ",") + field.name;
  return text;
}

inline std::string MetricsFile::csv(const std::vector<Field>& fields) {
  std::string text;
  for (auto& field : fields)
    text += (&field == &fields.front() ? "" : ",") +
            std::visit([](auto number) { return fmt::format("{}", number); }, field.number);
  return text;
}

inline std::string MetricsFile::json(const std::vector<Field>& fields) {
  std::string text = "{";
  for (auto& field : fields) {
    const auto* const real = std::get_if<double>(&field.number);
    const bool is_null = real && !std::isfinite(*real);
    const auto number = std::visit([](auto value) { return fmt::format("{}", value); }, field.number);
    text += fmt::format("{}\"{}\": {}", text.size() == 1 ? "" : ", ", field.name, is_null ? "null" : number);
  }
  return text + "}";
}

/// In one piece, so that a line is there or not.
inline void MetricsFile::put(std::string line) {
  line += '\n';
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() || std::fflush(file_.get()) != 0)
    fail(std::strerror(errno));
}

}  // namespace gradaccum
