// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

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

/// Options of a `MetricsFile`: its path, and how it is written.
struct MetricsFileOptions {
  std::filesystem::path path = {};  ///< `.csv`: comma-separated with a header line; `.jsonl`: one JSON object per line
  bool append = false;              ///< append to an existing file rather than overwrite it
  std::chrono::duration<double> flush_every = std::chrono::seconds(0);  ///< how long lines may be buffered
};

/// Writes named numbers, one line at a time, for spreadsheets and plots.
///
///     ga::MetricsFile file({.path = "metrics.csv"});
///     for (int epoch = 0; epoch < 3; ++epoch) file.write({{"epoch", epoch}, {"loss", 0.5 / (epoch + 1)}});
///
/// `write` passes each line to the operating system in one piece. With `.flush_every` it buffers lines, which are
/// written together by a later `write`, by `flush` or by the destructor. A line that was cut off, for example by a full
/// disk, is ended before the next. All lines of a CSV file have the same names in the same order. Doubles are written
/// so that they read back bit for bit; JSON has no NaN and infinity, so they become null.
///
/// A missing folder is made. Throws `std::runtime_error` with the file's name if writing fails, or if a name would need
/// quotes; the destructor warns.
class MetricsFile {
 public:
  using Number = std::variant<std::int64_t, std::uint64_t, double>;
  struct Field {
    std::string name;
    Number number;
    Field(std::string its_name, std::signed_integral auto value)
        : name(std::move(its_name)), number(std::int64_t{value}) {}
    Field(std::string its_name, std::unsigned_integral auto value)  // or a bool: 0 or 1
        : name(std::move(its_name)), number(std::uint64_t{value}) {}
    Field(std::string its_name, double value) : name(std::move(its_name)), number(value) {}
  };
  using Fields = std::vector<Field>;

  explicit MetricsFile(MetricsFileOptions options);
  void write(const Fields& fields);
  void flush();
  /// Removes the lines at the end whose number `name` is greater than `last`, for a run that resumes before them. Stops
  /// where the number falls from one line to the next, since another run began there, and at a line that has a number
  /// `without`.
  void remove_lines_at_end(std::string_view name, double last, std::string_view without = {});

 private:
  struct File;
  std::unique_ptr<File, void (*)(File*)> file_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/metrics_file.ipp>
#endif
