// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/machine_report.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/findings.hpp>
#include <gradaccum/detail/machine/machine_facts.hpp>
#include <gradaccum/detail/machine/machine_times.hpp>
#include <gradaccum/detail/machine/screen.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <ostream>

namespace gradaccum {

namespace detail {

/// In the width of a column.
GRADACCUM_INLINE std::string verdict(const MachineFinding& finding) {
  if (finding.ok()) return fmt::format("{:<18}", "ok");
  if (finding.loss <= 1) return fmt::format("{:<18}", "to mend");
  const double shown = std::min(finding.loss, 9999.0);
  return fmt::format("{:<18}", fmt::format("{:.{}f} times slower", shown, shown < 9.95 ? 1 : 0));
}

}  // namespace detail

GRADACCUM_INLINE bool MachineReport::ok() const {
  return std::ranges::all_of(findings, [](auto& finding) { return finding.ok(); });
}

GRADACCUM_INLINE std::string to_string(const MachineReport& report) {
  constexpr std::size_t width = 100;
  std::string text = detail::in_column("", report.machine, width) + '\n';
  for (auto& finding : report.findings) {
    const auto head = detail::verdict(finding);
    text += detail::in_column(head, finding.what + ": " + finding.seen, width);
    if (!finding.ok()) text += detail::in_column(std::string(head.size() + 2, ' '), finding.cure, width);
  }
  return text;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const MachineReport& report) {
  return stream << to_string(report);
}

GRADACCUM_INLINE MachineReport machine_report() {
  const auto facts = detail::machine_facts();
  return {detail::described(facts), detail::findings_of(facts, detail::machine_times(facts))};
}

}  // namespace gradaccum
