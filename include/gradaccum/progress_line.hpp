// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gradaccum {

/// Where the line goes, and how often.
struct ProgressLineOptions {
  std::FILE* to = stderr;                       ///< nullptr: nowhere
  bool only_on_terminal = false;                ///< silent where it is none
  std::chrono::milliseconds on_terminal{100};   ///< how often the line is rewritten there
  std::chrono::milliseconds elsewhere{30'000};  ///< how often a line is added elsewhere, in a log file say
  std::string unit = "samples";                 ///< what is counted
};

/// Shows how far a run is: ` 43% | update 401 | loss 2.2512 | 31024 samples/s | 0:41 left`.
///
///     ga::ProgressLine progress;
///     for (int i = 1; i <= 10; ++i) {
///       optimizer.step();
///       progress.update(i / 10.0, 2 * i, [&] { return "update " + std::to_string(optimizer.updates()); });
///     }
///
/// On a terminal it is one line that is rewritten, and wiped by `clear()` and at the end; elsewhere now and then a
/// plain line. The text is only asked for when it is shown: a loss that lies on a device is read then.
class ProgressLine {
 public:
  explicit ProgressLine(ProgressLineOptions options = {});
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// `fraction` of the whole is done, in [0, 1] (none: nobody knows), and that many samples. `text()` is what to say
  /// between the two.
  template <class Text>
  void update(std::optional<double> fraction, std::int64_t samples, const Text& text) {
    if (is_due()) show(line(fraction, samples, text()));
  }

  /// It will never show anything.
  bool silent() const { return !options_.to || (options_.only_on_terminal && !on_terminal_); }

  /// Wipes the line on a terminal, before something else is printed.
  void clear() noexcept;

  /// Says something on a line of its own.
  void say(const std::string& text);

  /// Time counts from now on, and what is done already does not.
  void restart(double fraction = 0, std::int64_t samples = 0);

 private:
  using Clock = std::chrono::steady_clock;

  bool is_due();
  std::string line(std::optional<double> fraction, std::int64_t samples, const std::string& text) const;
  void show(std::string line);

  ProgressLineOptions options_;
  bool on_terminal_;
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
  double fraction_before_ = 0;
  std::int64_t samples_before_ = 0;
  std::size_t width_ = 0;  // of the line on the terminal
};

/// A number of things a second, for a line or a table: `31024`, `8.86`, `0.42`. Three digits of it where it is small.
std::string rate_text(double rate);

namespace detail {

/// `3:07`, or `1:02:09` from an hour on.
std::string duration_text(double seconds);

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/progress_line.ipp>
#endif
