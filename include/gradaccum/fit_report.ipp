// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_report.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>

#include <fmt/format.h>

#include <ostream>
#include <string>

namespace gradaccum {
namespace detail {

GRADACCUM_INLINE FitReport report_of(const FitStatus& status) {
  FitReport report{.epochs = status.epochs,
                   .updates = status.updates,
                   .skipped = status.skipped,
                   .samples = status.samples,
                   .seconds = status.seconds(),
                   .resumed_from = status.resumed_from,
                   .stopped = status.stop_reason,
                   .signal = status.signal,
                   .nan_batches = status.nan_batches,
                   .first_nan = status.first_nan,
                   .validations = status.validations};
  report.samples_per_second = static_cast<double>(report.samples) / report.seconds;
  return report;
}

/// Two decimals, and three digits where these would be none.
GRADACCUM_INLINE std::string samples_per_second_text(double rate) {
  return rate < 1 ? rate_text(rate) : fmt::format("{:.2f}", rate);
}

GRADACCUM_INLINE double in_mb(std::int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(MiB); }

/// Of each name.
GRADACCUM_INLINE std::map<std::string, Validation> last_validations(const FitReport& report) {
  std::map<std::string, Validation> last;
  for (auto& validation : report.validations) last[validation.name] = validation;
  return last;
}

}  // namespace detail

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const FitReport& report) {
  stream << fmt::format("Time: {:.2f}\nSamples/second: {}\n", report.seconds,
                        detail::samples_per_second_text(report.samples_per_second));
  for (auto& [device, bytes] : report.occupied_bytes)
    stream << fmt::format("{} memory occupied: {:.0f} MB.\n", device == "cpu" ? "CPU" : "GPU", detail::in_mb(bytes));
  for (auto& [device, bytes] : report.peak_bytes)
    stream << fmt::format("Peak tensor memory: {} {:.2f} MB\n", device, detail::in_mb(bytes));
  if (report.peak_resident_bytes > 0)
    stream << fmt::format("Peak resident memory: {:.0f} MB\n", detail::in_mb(report.peak_resident_bytes));
  stream << fmt::format("Epochs: {}, updates: {}, skipped: {}\n", report.epochs, report.updates, report.skipped);
  if (report.nan_batches > 0)
    stream << fmt::format("Micro-batches left out for a loss of NaN or infinity: {}, the first: {}\n",
                          report.nan_batches, report.first_nan);
  if (!report.stopped.empty()) stream << "Stopped early: " << report.stopped << '\n';
  for (auto& [name, validation] : detail::last_validations(report))
    stream << "Last " << name << ", at update " << validation.update << ": " << validation.found << '\n';
  return stream;
}

}  // namespace gradaccum
