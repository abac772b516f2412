// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gradaccum {

struct ProgressLineOptions {
  std::FILE* to = stderr;                       ///< nullptr: nowhere
  bool only_on_terminal = false;                ///< silent where it is none
  std::chrono::milliseconds on_terminal{100};   ///< how often the line is rewritten there
  std::chrono::milliseconds elsewhere{30'000};  ///< how often a line is added elsewhere, in a log file say
};

/// Shows how far a run is: ` 43% | update 401 | loss 2.2512 | 31024 samples/s | 0:41 left`.
///
///     ga::ProgressLine progress;
///     for (int i = 1; i <= 10; ++i) {
///       optimizer.step();
///       progress.update(i / 10.0, 2 * i, [&] { return fmt::format("update {}", optimizer.updates()); });
///     }
///
/// On a terminal it is one line that is rewritten, and wiped by `clear()` and at the end; elsewhere now and then a
/// plain line. The text is only asked for when it is shown: a loss that lies on a device is read then.
class ProgressLine {
 public:
  explicit ProgressLine(ProgressLineOptions options = {})
      : options_(options), on_terminal_(options.to && isatty(fileno(options.to)) == 1) {}
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// `fraction` of the whole is done, in [0, 1] (none: nobody knows), and that many samples. `text()` is what to say
  /// between the two.
  template <class Text>
  void update(std::optional<double> fraction, std::int64_t samples, const Text& text) {
    if (silent()) return;
    const auto now = Clock::now();
    if (std::chrono::duration_cast<std::chrono::milliseconds>(now - last_shown_) < interval()) return;
    last_shown_ = now;
    show(line(fraction, samples, text()));
  }

  /// It will never show anything.
  bool silent() const { return !options_.to || (options_.only_on_terminal && !on_terminal_); }

  /// Wipes the line on a terminal, before something else is printed.
  void clear() noexcept {
    if (width_ > 0) std::fprintf(options_.to, "\r%*s\r", static_cast<int>(width_), "");
    if (width_ > 0) std::fflush(options_.to);
    width_ = 0;
  }

  /// Says something on a line of its own.
  void say(const std::string& text) {
    if (silent()) return;
    clear();
    std::fprintf(options_.to, "%s\n", text.c_str());
    std::fflush(options_.to);
  }

  /// Time counts from now on, and what is done already does not.
  void restart(double fraction = 0, std::int64_t samples = 0) {
    start_ = last_shown_ = Clock::now();
    fraction_before_ = fraction;
    samples_before_ = samples;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::chrono::milliseconds interval() const { return on_terminal_ ? options_.on_terminal : options_.elsewhere; }
  std::string line(std::optional<double> fraction, std::int64_t samples, const std::string& text) const;
  void show(std::string line);

  ProgressLineOptions options_;
  bool on_terminal_;
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
  double fraction_before_ = 0;
  std::int64_t samples_before_ = 0;
  std::size_t width_ = 0;  // of the line on the terminal
};

namespace detail {

/// `3:07`, or `1:02:09` from an hour on.
inline std::string duration_text(double seconds) {
  const auto total = static_cast<std::int64_t>(std::min(seconds, 1e12) + 0.5);
  const auto hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

}  // namespace detail

inline std::string ProgressLine::line(std::optional<double> fraction, std::int64_t samples,
                                      const std::string& text) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  auto line = fmt::format("{} | {:.0f} samples/s", text, static_cast<double>(samples - samples_before_) / seconds);
  if (!fraction || !(*fraction > 0)) return line;
  const double done = std::min(*fraction, 1.0);
  line = fmt::format("{:3.0f}% | {}", 100 * done, line);
  if (!(done > fraction_before_)) return line;
  return line + fmt::format(" | {} left", detail::duration_text(seconds * (1 - done) / (done - fraction_before_)));
}

/// A file that cannot be written to is no reason to stop a training: what C's functions return is ignored.
inline void ProgressLine::show(std::string line) {
  if (!on_terminal_) {
    std::fprintf(options_.to, "%s\n", line.c_str());
  } else {
    winsize terminal{};
    if (ioctl(fileno(options_.to), TIOCGWINSZ, &terminal) == 0 && terminal.ws_col > 0)
      line.resize(std::min<std::size_t>(line.size(), terminal.ws_col - 1));  // two rows could not be rewritten
    // padded, so that it covers a longer predecessor
    std::fprintf(options_.to, "\r%-*s", static_cast<int>(width_), line.c_str());
    width_ = line.size();
  }
  std::fflush(options_.to);
}

}  // namespace gradaccum
