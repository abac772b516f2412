// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gradaccum {

struct ProgressLineOptions {
  std::FILE* to = stderr;
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
  explicit ProgressLine(ProgressLineOptions options = {}) : options_(options), on_terminal_(is_terminal(options.to)) {}
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// `fraction` of the whole is done, in [0, 1] (none: nobody knows), and that many samples. `text()` is what to say
  /// between the two.
  template <class Text>
  void update(std::optional<double> fraction, std::int64_t samples, const Text& text) {
    if (options_.only_on_terminal && !on_terminal_) return;
    const auto now = Clock::now();
    if (now - last_shown_ < interval()) return;
    last_shown_ = now;
    show(line(fraction, samples, text()));
  }

  /// Wipes the line on a terminal, before something else is printed.
  void clear() noexcept {
    if (width_ > 0) std::fprintf(options_.to, "\r%*s\r", static_cast<int>(width_), "");
    if (width_ > 0) std::fflush(options_.to);
    width_ = 0;
  }

  /// Time and samples count from now on.
  void restart() { start_ = last_shown_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;

  static bool is_terminal(std::FILE* file) { return isatty(fileno(file)) == 1; }
  Clock::duration interval() const { return on_terminal_ ? options_.on_terminal : options_.elsewhere; }
  std::string line(std::optional<double> fraction, std::int64_t samples, const std::string& text) const;
  void show(const std::string& line);

  ProgressLineOptions options_;
  bool on_terminal_;
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
  std::size_t width_ = 0;  // of the line on the terminal
};

namespace detail {

/// `3:07`, or `1:02:09` from an hour on.
inline std::string duration_text(double seconds) {
  const auto total = static_cast<std::int64_t>(seconds + 0.5);
  const auto hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

}  // namespace detail

inline std::string ProgressLine::line(std::optional<double> fraction, std::int64_t samples,
                                      const std::string& text) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  auto line = fmt::format("{} | {:.0f} samples/s", text, static_cast<double>(samples) / seconds);
  if (!fraction || !(*fraction > 0)) return line;
  return fmt::format("{:3.0f}% | {} | {} left", 100 * *fraction, line,
                     detail::duration_text(seconds * (1 - *fraction) / *fraction));
}

inline void ProgressLine::show(const std::string& line) {
  if (!on_terminal_) {
    fmt::print(options_.to, "{}\n", line);
  } else {
    fmt::print(options_.to, "\r{:<{}}", line, width_);  // padded, so that it covers a longer predecessor
    width_ = line.size();
  }
  std::fflush(options_.to);
}

}  // namespace gradaccum
