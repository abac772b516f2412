// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/detail/build/inline.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gradaccum {

/// The destination of a progress line, and its intervals.
struct ProgressLineOptions {
  std::FILE* to = stderr;                       ///< nullptr: no output
  bool only_on_terminal = false;                ///< no output unless `to` is a terminal
  std::chrono::milliseconds on_terminal{100};   ///< interval of rewriting the line on a terminal
  std::chrono::milliseconds elsewhere{30'000};  ///< interval of adding a line elsewhere, such as in a log file
  std::string unit = "samples";                 ///< name of the counted items
  double peak_flops = 0;                        ///< of all devices together, to show the MFU; 0: unknown
};

/// Shows the progress of a run: ` 43% | update 401 | loss 2.2512 | 31024 samples/s | 0:41 left`.
///
///     ga::ProgressLine progress;
///     for (int i = 1; i <= 10; ++i) {
///       optimizer.step();
///       progress.update(i / 10.0, 2 * i, [&] { return "update " + std::to_string(optimizer.updates()); });
///     }
///
/// On a terminal it rewrites one line, which `clear()` and the destructor erase; otherwise it adds a line from time to
/// time. The text is computed only when it is shown, so that a loss on a device is read only then.
class ProgressLine {
 public:
  explicit ProgressLine(ProgressLineOptions options = {});
  ProgressLine& operator=(ProgressLine&&) = delete;
  ~ProgressLine() { clear(); }

  /// Shows the line if it is due. `fraction`, in [0, 1], is the part of the run that is done, or nullopt if unknown;
  /// `samples` is the number so far. `text()` returns the text between percentage and rate. `flops`, the number of
  /// floating-point operations so far, is shown as FLOP/s and MFU.
  template <class Text>
  void update(std::optional<double> fraction, std::int64_t samples, const Text& text, double flops = 0) {
    if (is_due()) show(line(fraction, samples, text(), flops));
  }

  /// Returns true if nothing will ever be shown.
  bool silent() const { return !options_.to || (options_.only_on_terminal && !on_terminal_); }

  /// Erases the line on a terminal, before something else is printed.
  void clear() noexcept;

  /// Prints a text on its own line.
  void say(const std::string& text);

  /// Restarts the measurement of time, with the work that is already done, which the rate excludes.
  void restart(double fraction = 0, std::int64_t samples = 0, double flops = 0);

 private:
  using Clock = std::chrono::steady_clock;

  bool is_due();
  std::string line(std::optional<double> fraction, std::int64_t samples, const std::string& text, double flops) const;
  void show(std::string line);

  ProgressLineOptions options_;
  bool on_terminal_;
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
  double fraction_before_ = 0, flops_before_ = 0;
  std::int64_t samples_before_ = 0;
  std::size_t width_ = 0;  // width of the line on the terminal
};

/// Formats a number per second: `31024`, `8.86`, `0.42`. Small ones have three significant digits.
std::string rate_text(double rate);

/// Formats FLOP/s with the MFU, their share of a peak, if that is not 0: `1.23 TFLOP/s, MFU 43.2 % of 2.85 TFLOP/s`.
std::string flops_text(double flops_per_second, double peak = 0);

namespace detail {

/// Formats a duration: `3:07`, or `1:02:09` from an hour on.
std::string duration_text(double seconds);

/// Formats a number as printf does, NaN and infinity included, for which fmt prints digits in a -ffast-math program.
std::string number_text(const char* format, double number);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/progress_line.ipp>
#endif
