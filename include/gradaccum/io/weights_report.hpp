// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <iosfwd>
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
};

std::ostream& operator<<(std::ostream& stream, const WeightsReport& report);

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/weights_report.ipp>
#endif
