// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/profile_report.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

inline constexpr std::size_t shown_operations = 10;

GRADACCUM_INLINE std::string milliseconds_text(double seconds) { return fmt::format("{:.3f}", 1e3 * seconds); }
GRADACCUM_INLINE std::string mebibytes_text(std::int64_t bytes) {
  return fmt::format("{:.3f}", static_cast<double>(bytes) / (1 << 20));
}

GRADACCUM_INLINE std::string phase_table(const ProfileReport& report) {
  auto text = fmt::format("{:<24} {:>7} {:>12} {:>8}\n", "Phase", "Share", "ms", "Times");
  for (auto& phase : report.phases)
    text += fmt::format("{:<24} {:>6.1f}% {:>12} {:>8}\n", phase.name, 100 * phase.share,
                        milliseconds_text(phase.seconds), phase.times);
  return text;
}

/// Formats the operations by time. Has a column for devices only if one was used.
GRADACCUM_INLINE std::string operations_by_time(const std::vector<ProfiledOperation>& operations) {
  double self_cpu = 0, device = 0;
  for (auto& operation : operations) self_cpu += operation.self_cpu_seconds, device += operation.device_seconds;
  auto text = fmt::format("{:<56} {:>8} {:>12} {:>7} {:>12}{}\n", "Operation, by its own time", "Calls", "CPU ms",
                          "Share", "in all, ms", device > 0 ? "    Device ms" : "");
  for (std::size_t i = 0; i < std::min(operations.size(), shown_operations); ++i) {
    const auto& of = operations[i];
    text +=
        fmt::format("{:<56} {:>8} {:>12} {:>6.1f}% {:>12}", of.name, of.calls, milliseconds_text(of.self_cpu_seconds),
                    self_cpu > 0 ? 100 * of.self_cpu_seconds / self_cpu : 0, milliseconds_text(of.cpu_seconds));
    if (device > 0) text += fmt::format(" {:>12}", milliseconds_text(of.device_seconds));
    text += '\n';
  }
  return text;
}

GRADACCUM_INLINE std::string operations_by_memory(const std::vector<ProfiledOperation>& operations) {
  auto text = fmt::format("{:<56} {:>8} {:>12} {:>12}\n", "Operation, by what it allocates", "Calls", "MB", "kept, MB");
  for (auto& of : operations)
    text += fmt::format("{:<56} {:>8} {:>12} {:>12}\n", of.name, of.calls, mebibytes_text(of.allocated_bytes),
                        mebibytes_text(of.kept_bytes));
  return text;
}

GRADACCUM_INLINE std::string memory_table(const ProfileReport& report) {
  auto text = fmt::format("{:<24} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n", "Memory at the end, MB", "Parameters",
                          "Optimizer", "Gradients", "Activations", "Rest", "Sum");
  for (auto& [phase, bytes] : report.memory)
    text += fmt::format("{:<24} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}\n", phase, mebibytes_text(bytes.parameters),
                        mebibytes_text(bytes.optimizer_state), mebibytes_text(bytes.gradients),
                        mebibytes_text(bytes.activations), mebibytes_text(bytes.rest), mebibytes_text(bytes.total()));
  return text + fmt::format("Peak: {} MB\n", mebibytes_text(report.peak_bytes));
}

}  // namespace detail

GRADACCUM_INLINE std::vector<ProfiledOperation> ProfileReport::by_memory(std::size_t most) const {
  auto sorted = operations;
  std::stable_sort(sorted.begin(), sorted.end(), [](const ProfiledOperation& a, const ProfiledOperation& b) {
    return a.allocated_bytes > b.allocated_bytes;
  });
  sorted.resize(std::min(sorted.size(), most));
  while (!sorted.empty() && sorted.back().allocated_bytes == 0) sorted.pop_back();
  return sorted;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const ProfileReport& report) {
  if (report.updates > 0) stream << "Updates: " << report.updates << '\n';
  stream << "Time: " << detail::milliseconds_text(report.seconds) << " ms\n\n"
         << detail::phase_table(report) << '\n'
         << detail::operations_by_time(report.operations) << '\n'
         << detail::operations_by_memory(report.by_memory(detail::shown_operations));
  if (!report.memory.empty()) stream << '\n' << detail::memory_table(report);
  return stream;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
