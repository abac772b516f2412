// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <iosfwd>
#include <optional>
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
};

std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/checkpoint_plan.ipp>
#endif
