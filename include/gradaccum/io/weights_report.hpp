// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

namespace gradaccum::io {

/// What a module and a file of weights do not have in common.
struct WeightsReport {
  std::vector<std::string> missing = {};  ///< in the module only
  std::vector<std::string> unexpected =
      {};  ///< in the file only; `weight (not in the index)`: in a file, but not listed
  std::vector<std::string> mis_shaped = {};   ///< `weight: [2, 3] in the file, [3, 2] in the module`
  std::vector<std::string> new_weights = {};  ///< in the module only, as they may be: they stay as they are

  /// All fits but for what may be missing.
  bool complete() const { return missing.empty() && unexpected.empty() && mis_shaped.empty(); }

  friend std::ostream& operator<<(std::ostream& stream, const WeightsReport& report) {
    if (report.complete() && report.new_weights.empty()) return stream << "all weights fit";
    print(stream, "missing", report.missing);
    print(stream, "unexpected", report.unexpected);
    print(stream, "mis-shaped", report.mis_shaped);
    print(stream, "new", report.new_weights);
    return stream;
  }

 private:
  static void print(std::ostream& stream, const char* heading, const std::vector<std::string>& lines) {
    constexpr std::size_t shown = 10;
    if (lines.empty()) return;
    stream << heading << " (" << lines.size() << "):";
    for (std::size_t i = 0; i < std::min(lines.size(), shown); ++i) stream << "\n  " << lines[i];
    if (lines.size() > shown) stream << "\n  and " << lines.size() - shown << " more";
    stream << "\n";
  }
};

}  // namespace gradaccum::io
