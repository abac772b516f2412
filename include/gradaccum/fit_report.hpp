// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <ostream>
#include <string>

namespace gradaccum {

/// What a `fit` has done. Printed, it is a summary:
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     std::cout << trainer.fit(batches, {.epochs = 3});
///
/// | line | what it says |
/// |---|---|
/// | `Time: 57.82` | seconds |
/// | `Samples/second: 8.86` | |
/// | `GPU memory occupied: 8681 MB.` | at the end, by all processes; `CPU memory occupied` is this process's |
/// | `Peak tensor memory: cuda:0 8.12 MB` | of tensors that this `fit` allocated |
/// | `Epochs: 3, updates: 938, skipped: 2` | skipped: windows that moved nothing |
///
/// 1 MB is 2^20 bytes.
struct FitReport {
  std::int64_t epochs = 0, updates = 0, skipped = 0, samples = 0;
  double seconds = 0, samples_per_second = 0;
  std::string resumed_from = {};  ///< the state that it went on from; then all numbers are those of the whole `fit`
  int signal = 0;                 ///< SIGINT or SIGTERM, if one ended it: a program then exits with 128 + signal
  std::int64_t nan_batches = 0;   ///< left out: see `OnNan::skip`
  std::string first_nan = {};     ///< which was the first of them
  std::map<std::string, std::int64_t> occupied_bytes = {};  ///< by device
  std::map<std::string, std::int64_t> peak_bytes = {};      ///< by device; empty where nothing was measured
};

namespace detail {

inline FitReport report_of(const FitStatus& status) {
  FitReport report{.epochs = status.epochs,
                   .updates = status.updates,
                   .skipped = status.skipped,
                   .samples = status.samples,
                   .seconds = status.seconds(),
                   .resumed_from = status.resumed_from,
                   .signal = status.signal,
                   .nan_batches = status.nan_batches,
                   .first_nan = status.first_nan};
  report.samples_per_second = static_cast<double>(report.samples) / report.seconds;
  return report;
}

inline double in_mb(std::int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(MiB); }

}  // namespace detail

inline std::ostream& operator<<(std::ostream& stream, const FitReport& report) {
  stream << fmt::format("Time: {:.2f}\nSamples/second: {:.2f}\n", report.seconds, report.samples_per_second);
  for (auto& [device, bytes] : report.occupied_bytes)
    stream << fmt::format("{} memory occupied: {:.0f} MB.\n", device == "cpu" ? "CPU" : "GPU", detail::in_mb(bytes));
  for (auto& [device, bytes] : report.peak_bytes)
    stream << fmt::format("Peak tensor memory: {} {:.2f} MB\n", device, detail::in_mb(bytes));
  stream << fmt::format("Epochs: {}, updates: {}, skipped: {}\n", report.epochs, report.updates, report.skipped);
  if (report.nan_batches > 0)
    stream << fmt::format("Micro-batches left out for a loss of NaN or infinity: {}, the first: {}\n",
                          report.nan_batches, report.first_nan);
  return stream;
}

}  // namespace gradaccum
