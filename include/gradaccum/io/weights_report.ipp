// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/weights_report.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <cstddef>
#include <ostream>

namespace gradaccum::detail {

GRADACCUM_INLINE void print_weights(std::ostream& stream, const char* heading, const std::vector<std::string>& lines) {
  constexpr std::size_t shown = 10;
  if (lines.empty()) return;
  stream << heading << " (" << lines.size() << "):";
  for (std::size_t i = 0; i < std::min(lines.size(), shown); ++i) stream << "\n  " << lines[i];
  if (lines.size() > shown) stream << "\n  and " << lines.size() - shown << " more";
  stream << "\n";
}

}  // namespace gradaccum::detail

namespace gradaccum::io {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const WeightsReport& report) {
  if (report.complete() && report.new_weights.empty()) return stream << "all weights fit";
  detail::print_weights(stream, "missing", report.missing);
  detail::print_weights(stream, "unexpected", report.unexpected);
  detail::print_weights(stream, "mis-shaped", report.mis_shaped);
  detail::print_weights(stream, "new", report.new_weights);
  return stream;
}

}  // namespace gradaccum::io
