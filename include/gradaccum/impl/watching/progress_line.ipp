// SPDX-License-Identifier: Apache-2.0
// Shows a line of progress with the time left, on a terminal or in a log.
#pragma once

#include <gradaccum/progress_line.hpp>

#include <gradaccum/detail/platform/platform.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE std::string rate_text(double rate) {
  return rate < 99.95 ? fmt::format("{:.3g}", rate) : fmt::format("{:.0f}", rate);
}

GRADACCUM_INLINE std::string flops_text(double flops_per_second, double peak) {
  const auto text = [](double rate) {
    std::string_view prefixes = " kMGTPE";
    for (; rate >= 999.5 && prefixes.size() > 1; rate /= 1000) prefixes.remove_prefix(1);
    return fmt::format("{:.3g} {}FLOP/s", rate, prefixes[0] == ' ' ? "" : std::string(1, prefixes[0]));
  };
  if (!(peak > 0)) return text(flops_per_second);
  return fmt::format("{}, MFU {:.1f} % of {}", text(flops_per_second), 100 * flops_per_second / peak, text(peak));
}

GRADACCUM_INLINE std::string detail::duration_text(double seconds) {
  const auto total = static_cast<std::int64_t>(std::min(seconds, 1e12) + 0.5);
  const auto hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

GRADACCUM_INLINE std::string detail::number_text(const char* format, double number) {
  std::string text(static_cast<std::size_t>(std::snprintf(nullptr, 0, format, number)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, number);
  std::replace(text.begin(), text.end(), ',', '.');  // the decimal comma of C's locale
  return text;
}

GRADACCUM_INLINE ProgressLine::ProgressLine(ProgressLineOptions options)
    : options_(std::move(options)), on_terminal_(options_.to && detail::is_terminal(options_.to)) {}

GRADACCUM_INLINE bool ProgressLine::is_due() {
  if (silent()) return false;
  const auto now = Clock::now();
  const auto interval = on_terminal_ ? options_.on_terminal : options_.elsewhere;
  if (std::chrono::duration_cast<std::chrono::milliseconds>(now - last_shown_) < interval) return false;
  last_shown_ = now;
  return true;
}

GRADACCUM_INLINE void ProgressLine::clear() noexcept {
  if (width_ == 0) return;
  std::fprintf(options_.to, "\r%*s\r", static_cast<int>(width_), "");
  std::fflush(options_.to);
  width_ = 0;
}

GRADACCUM_INLINE void ProgressLine::say(const std::string& text) {
  if (silent()) return;
  clear();
  std::fprintf(options_.to, "%s\n", text.c_str());
  std::fflush(options_.to);
}

GRADACCUM_INLINE void ProgressLine::restart(double fraction, std::int64_t samples, double flops) {
  start_ = last_shown_ = Clock::now();
  fraction_before_ = fraction;
  samples_before_ = samples;
  flops_before_ = flops;
}

GRADACCUM_INLINE std::string ProgressLine::line(std::optional<double> fraction, std::int64_t samples,
                                                const std::string& text, double flops) const {
  const double seconds = std::max(1e-6, std::chrono::duration<double>(Clock::now() - start_).count());
  auto line = fmt::format("{} | {} {}/s", text, rate_text(static_cast<double>(samples - samples_before_) / seconds),
                          options_.unit);
  if (flops > 0) line += " | " + flops_text((flops - flops_before_) / seconds, options_.peak_flops);
  if (!fraction || !(*fraction > 0)) return line;
  const double done = std::min(*fraction, 1.0);
  line = fmt::format("{:3.0f}% | {}", 100 * done, line);
  if (!(done > fraction_before_)) return line;
  return line + fmt::format(" | {} left", detail::duration_text(seconds * (1 - done) / (done - fraction_before_)));
}

/// Ignores errors of C's functions, since an unwritable file is no reason to stop a training.
GRADACCUM_INLINE void ProgressLine::show(std::string line) {
  if (!on_terminal_) {
    std::fprintf(options_.to, "%s\n", line.c_str());
  } else {
    if (const auto columns = detail::terminal_columns(options_.to); columns > 0)
      line.resize(std::min(line.size(), columns - 1));  // a wrapped line could not be rewritten
    // pads the line, to cover a longer previous one
    std::fprintf(options_.to, "\r%-*s", static_cast<int>(width_), line.c_str());
    width_ = line.size();
  }
  std::fflush(options_.to);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
