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

/// Options for recomputing a checkpointed part.
struct CheckpointOptions {
  /// Restores random generators to their state in the forward pass, so that dropout drops the same elements. Without
  /// it, a part that draws no random numbers is a microsecond faster.
  bool preserve_rng = true;
  /// Ends the recomputation with the last tensor that backward needs, rather than with the part.
  bool early_stop = true;
  /// Compares contents of saved and recomputed tensors, not just shapes, dtypes and devices, to find a part that does
  /// not do the same twice. Slow: reads everything twice, and waits for the device.
  bool check_content = false;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/planner.ipp>
#endif
