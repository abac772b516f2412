// SPDX-License-Identifier: Apache-2.0
// Computes the progress of a fit, and prints its report.
#pragma once

#include <gradaccum/fit_options.hpp>

#include <gradaccum/progress_line.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void check(const FitOptions& options) {
  TORCH_CHECK(options.epochs.value_or(0) >= 0, "FitOptions: epochs must be >= 0, got ", *options.epochs);
  TORCH_CHECK(options.updates.value_or(0) >= 0, "FitOptions: updates must be >= 0, got ", *options.updates);
  TORCH_CHECK(options.samples.value_or(0) >= 0, "FitOptions: samples must be >= 0, got ", *options.samples);
  TORCH_CHECK(detail::is_finite(options.peak_flops) && options.peak_flops >= 0,
              "FitOptions: peak_flops must be finite and >= 0, got ", options.peak_flops);
  TORCH_CHECK(!options.time || options.time->count() >= 0, "FitOptions: time must be >= 0 s, got ",
              options.time->count());
}

GRADACCUM_INLINE bool FitProgress::done() const {
  if (stopped || signal_ != 0 || (options.smoke && updates + skipped > 0)) return true;
  if (options.updates && updates >= *options.updates) return true;
  return options.has_limit() ? epochs == options.epochs : epochs >= options.epochs.value_or(1);
}

GRADACCUM_INLINE double FitProgress::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}
GRADACCUM_INLINE double FitProgress::seconds_of_call() const {
  return std::chrono::duration<double>(Clock::now() - begun_).count();
}

GRADACCUM_INLINE std::optional<double> FitProgress::fraction() const {
  if (done()) return 1;
  std::optional<double> most;  // the largest: of the limit that is reached first
  const auto add = [&most](double part) { most = std::max(part, most.value_or(0)); };
  if (options.updates) add(static_cast<double>(updates) / static_cast<double>(*options.updates));
  if (options.samples.value_or(0) > 0) add(static_cast<double>(samples) / static_cast<double>(*options.samples));
  if (options.time) add(seconds_of_call() / options.time->count());
  if (batches.value_or(0) > 0 && (options.epochs || !options.has_limit())) {
    const auto of_epoch = static_cast<double>(std::min(batch, *batches)) / static_cast<double>(*batches);
    add((static_cast<double>(epochs) + of_epoch) / static_cast<double>(options.epochs.value_or(1)));
  }
  if (most) most = std::min(*most, 1.0);
  return most;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const FitReport& report) {
  const auto in_mb = [](std::int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(MiB); };
  const auto rate = report.samples_per_second;  // two decimals; below 1 as in rate_text()
  stream << fmt::format("Time: {:.2f}\nSamples/second: {}\n", report.seconds,
                        rate < 1 ? rate_text(rate) : fmt::format("{:.2f}", rate));
  if (!report.unit.empty()) {
    auto unit = report.unit;
    unit[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(unit[0])));
    stream << fmt::format("{}/second: {:.2f}\n", unit, report.items / report.seconds);
  }
  if (report.flops > 0) stream << "FLOP/s: " << flops_text(report.flops_per_second, report.peak_flops) << '\n';
  for (auto& [device, bytes] : report.occupied_bytes)
    stream << fmt::format("{} memory occupied: {:.0f} MB.\n", device == "cpu" ? "CPU" : "GPU", in_mb(bytes));
  for (auto& [device, bytes] : report.peak_bytes)
    stream << fmt::format("Peak tensor memory: {} {:.2f} MB\n", device, in_mb(bytes));
  if (report.peak_resident_bytes > 0)
    stream << fmt::format("Peak resident memory: {:.0f} MB\n", in_mb(report.peak_resident_bytes));
  stream << fmt::format("Epochs: {}, updates: {}, skipped: {}\n", report.epochs, report.updates, report.skipped);
  if (report.nan_batches > 0)
    stream << fmt::format("Micro-batches left out for a loss or gradient of NaN or infinity: {}, the first: {}\n",
                          report.nan_batches, report.first_nan);
  if (report.rejected > 0)
    stream << fmt::format("Windows rejected: {}, the first for {}\n", report.rejected, report.first_rejected);
  if (!report.stopped.empty()) stream << "Stopped early: " << report.stopped << '\n';
  std::map<std::string, const Validation*> last;
  for (auto& validation : report.validations) last[validation.name] = &validation;
  for (auto& [name, validation] : last)
    stream << "Last " << name << ", at update " << validation->update << ": " << validation->found << '\n';
  for (auto& note : report.notes) stream << "Note: " << note << '\n';
  return stream;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
