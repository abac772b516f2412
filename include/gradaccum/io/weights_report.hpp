// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <iosfwd>
#include <string>
#include <vector>

namespace gradaccum::io {

/// The differences between a module and a file of weights.
struct WeightsReport {
  std::vector<std::string> missing = {};  ///< only in the module
  std::vector<std::string> unexpected =
      {};  ///< only in the file; `weight (not in the index)`: in a file, but not listed
  std::vector<std::string> mis_shaped = {};   ///< `weight: [2, 3] in the file, [3, 2] in the module`
  std::vector<std::string> new_weights = {};  ///< only in the module, as permitted; they keep their values

  /// Returns true if everything fits, apart from weights that may be missing.
  bool complete() const { return missing.empty() && unexpected.empty() && mis_shaped.empty(); }
};

std::ostream& operator<<(std::ostream& stream, const WeightsReport& report);

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/weights_report.ipp>
#endif
