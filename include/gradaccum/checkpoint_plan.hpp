// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

namespace gradaccum {

/// The schedule of a `CheckpointedSequential`, and its predicted cost. Printable.
struct CheckpointPlan {
  /// The peak bytes during forward and backward, and the seconds of both.
  struct Cost {
    std::int64_t peak_bytes = 0;
    double seconds = 0;
  };

  /// The schedule as `[0-2] 3 [[4 5] 6] 7-9*`, with stages by number. `[...]` keeps only its input, and is recomputed
  /// in backward. `*` recomputes results of cheap operations (GELU, SiLU, products) from their inputs.
  std::string schedule;

  /// The budget, if there is one. Costs are then for inputs of the planned shape, as measured stage by stage.
  std::optional<std::int64_t> memory_budget;
  Cost predicted;                ///< cost of this schedule
  Cost plain;                    ///< cost of the stages without checkpoints
  std::int64_t least_bytes = 0;  ///< no schedule needs less
};

std::ostream& operator<<(std::ostream& out, const CheckpointPlan& plan);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/checkpoint_plan.ipp>
#endif
