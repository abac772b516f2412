// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/compiled_step.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ostream>

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const CompiledStepReport& report) {
  stream << report.compiled << " of " << report.compiled + report.eager << " steps compiled\n";
  for (auto& [why, count] : report.why_eager) stream << count << " not: " << why << '\n';
  return stream;
}

}  // namespace gradaccum
