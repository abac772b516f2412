// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum {

/// Which file, and whether it goes on.
struct MetricsFileOptions {
  std::filesystem::path path = {};  ///< `.csv`: comma-separated with a line of names; `.jsonl`: a JSON object a line
  bool append = false;              ///< go on with a file that is there; else it is begun anew
  std::chrono::duration<double> flush_every = std::chrono::seconds(0);  ///< how long lines may wait, while more come
};

/// Numbers with names, a line at a time, for spreadsheets and plots.
///
///     ga::MetricsFile file({.path = "metrics.csv"});
///     for (int epoch = 0; epoch < 3; ++epoch) file.write({{"epoch", epoch}, {"loss", 0.5 / (epoch + 1)}});
///
/// A line is with the operating system when `write` returns, in one piece, or with `.flush_every` a little later,
/// together with others: by a later line, by `flush`, at the end. One that was cut off, by a full disk say, is ended
/// before the next. All lines of a CSV file have the same names, in the same order. Doubles are written so that
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
  void flush();
  /// Removes the lines at the end in which the number of this name is higher: for a run that goes on from before them.
  /// As far as the number goes up: where it goes down from one line to the next, another run had begun. And as far as
  /// lines have no number `without`.
  void remove_lines_at_end(std::string_view name, double last, std::string_view without = {});

 private:
  struct File;
  struct Close {
    void operator()(File* file) const;
  };
  std::unique_ptr<File, Close> file_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/metrics_file.ipp>
#endif
