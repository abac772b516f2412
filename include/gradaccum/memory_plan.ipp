// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/memory_plan.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <ostream>

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  const auto mib = [](std::int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); };
  out << "budget " << (plan.budget > 0 ? mib(plan.budget) : "not known") << ", gradients " << mib(plan.gradient_bytes)
      << " of it";
  if (plan.checkpoint_budget > 0) out << ", checkpointed parts " << mib(plan.checkpoint_budget);
  out << '\n';
  for (auto& layout : plan.layouts) {
    out << layout.batch << ": " << layout.rows << " rows at once, predicted peak " << mib(layout.predicted_bytes);
    if (layout.measured_bytes > 0) out << ", measured " << mib(layout.measured_bytes);
    out << '\n';
  }
  if (plan.replays > 0) out << plan.replays << " times a batch was begun again with fewer rows\n";
  return out;
}

}  // namespace gradaccum
