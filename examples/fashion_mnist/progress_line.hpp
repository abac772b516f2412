// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "running_mean.hpp"

namespace fashion_mnist {

/// `3:07`, or `1:02:09` from an hour on.
inline std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(seconds + 0.5);
  const auto hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

/// Shows how far a run is: ` 43% | update 401/938 | loss 2.2512 | 31024 samples/s | 0:41 left`.
///
/// On a terminal this is one line, rewritten ten times a second. Elsewhere, in a log file say, it is a plain line
/// every 30 seconds. The loss is read from the device only when it is shown.
class ProgressLine {
 public:
  ProgressLine(std::int64_t epochs, std::int64_t samples_per_epoch)
      : samples_per_epoch_(samples_per_epoch), samples_left_(epochs * samples_per_epoch) {}
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// `updates` is the count before the epoch, that of add() the count so far.
  void begin_epoch(std::int64_t updates, std::int64_t updates_per_epoch) {
    first_update_ = updates;
    updates_per_epoch_ = updates_per_epoch;
    loss_ = {};
  }

  void add(const at::Tensor& loss, std::int64_t samples, std::int64_t updates) {
    loss_.add(loss, samples);
    samples_done_ += samples;
    samples_left_ -= samples;
    const auto now = Clock::now();
    if (now - last_shown_ < interval_) return;
    last_shown_ = now;
    show(describe(updates - first_update_, std::chrono::duration<double>(now - start_).count()));
  }

  /// Wipes the line, before something else is printed.
  void clear() noexcept {
    if (width_ > 0) std::printf("\r%*s\r", static_cast<int>(width_), "");
    width_ = 0;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string describe(std::int64_t updates, double seconds) const {
    const double percent = 100.0 * static_cast<double>(loss_.samples()) / static_cast<double>(samples_per_epoch_);
    const double rate = static_cast<double>(samples_done_) / seconds;
    return fmt::format("{:3.0f}% | update {}/{} | loss {:.4f} | {:.0f} samples/s | {} left", percent, updates,
                       updates_per_epoch_, loss_.value(), rate,
                       format_duration(static_cast<double>(samples_left_) / rate));
  }

  void show(const std::string& line) {
    if (!on_terminal_) {
      fmt::print("{}\n", line);
    } else {
      fmt::print("\r{:<{}}", line, width_);  // padded, so that it covers a longer predecessor
      width_ = line.size();
    }
    std::fflush(stdout);
  }

  bool on_terminal_ = isatty(STDOUT_FILENO) == 1;
  Clock::duration interval_ = on_terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(30);
  Clock::time_point start_ = Clock::now(), last_shown_ = start_;
  std::size_t width_ = 0;  // of the line on the terminal
  std::int64_t samples_per_epoch_, samples_left_, samples_done_ = 0;
  std::int64_t first_update_ = 0, updates_per_epoch_ = 0;
  RunningMean loss_;  // over the epoch so far
};

}  // namespace fashion_mnist
