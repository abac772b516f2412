// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/memory_plan.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <ostream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  const auto mib = [](std::int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); };
  out << "budget " << (plan.budget > 0 ? mib(plan.budget) : "not known") << ", gradients " << mib(plan.gradient_bytes)
      << " of it";
  if (plan.checkpoint_budget > 0) out << ", checkpointed parts " << mib(plan.checkpoint_budget);
  out << '\n';
  constexpr std::size_t most = 8;  // sequences have many lengths
  for (std::size_t i = 0; i < std::min(plan.layouts.size(), most); ++i) {
    const auto& layout = plan.layouts[i];
    out << layout.batch << ": " << layout.rows << " rows at once, predicted peak " << mib(layout.predicted_bytes);
    if (layout.measured_bytes > 0) out << ", measured " << mib(layout.measured_bytes);
    out << '\n';
  }
  if (plan.layouts.size() > most) out << "and " << plan.layouts.size() - most << " other layouts\n";
  if (plan.replays > 0) out << plan.replays << " times a batch was begun again with fewer rows\n";
  return out;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
