// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_plan.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <ostream>

namespace gradaccum {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan) {
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  if (plan.memory_budget)
    out << fmt::format(
        "budget {:.2f} MiB: peak {:.2f} MiB (plain {:.2f}, least {:.2f}), {:+.1f} % time ({:.2f} ms, plain {:.2f})\n",
        mib(*plan.memory_budget), mib(plan.predicted.peak_bytes), mib(plan.plain.peak_bytes), mib(plan.least_bytes),
        100 * (plan.predicted.seconds / plan.plain.seconds - 1), 1e3 * plan.predicted.seconds,
        1e3 * plan.plain.seconds);
  return out << "schedule: " << plan.schedule << '\n';
}

}  // namespace gradaccum
