// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

namespace gradaccum {

/// What a `CheckpointedSequential` does with its stages, and what that should cost; prints itself.
struct CheckpointPlan {
  /// Bytes at the worst moment of forward and backward, and the seconds of both.
  struct Cost {
    std::int64_t peak_bytes = 0;
    double seconds = 0;
  };

  /// `[0-2] 3 [[4 5] 6] 7-9*`: stages by number. `[...]` keeps only its input, and runs again in backward; `*`: results
  /// of cheap operations (GELU, SiLU, products) are made again from their inputs.
  std::string schedule;

  /// Where a budget was given, for inputs of the shape that was planned for; all as measured, stage by stage.
  std::optional<std::int64_t> memory_budget;
  Cost predicted;                ///< of this schedule
  Cost plain;                    ///< of the same stages without checkpoints
  std::int64_t least_bytes = 0;  ///< no schedule needs less

  friend std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan) {
    const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    if (plan.memory_budget)
      out << fmt::format(
          "budget {:.2f} MiB: peak {:.2f} MiB (plain {:.2f}, least {:.2f}), {:+.1f} % time ({:.2f} ms, plain {:.2f})\n",
          mib(*plan.memory_budget), mib(plan.predicted.peak_bytes), mib(plan.plain.peak_bytes), mib(plan.least_bytes),
          100 * (plan.predicted.seconds / plan.plain.seconds - 1), 1e3 * plan.predicted.seconds,
          1e3 * plan.plain.seconds);
    return out << "schedule: " << plan.schedule << '\n';
  }
};

}  // namespace gradaccum
