// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace gradaccum {

/// The plan of `FitMemory`: how many rows run at once, and their memory. Printable. Bytes are those beyond the memory
/// held before an update: activations, and the gradients that the update accumulates.
struct MemoryPlan {
  /// Batches with rows of one kind.
  struct Layout {
    std::string batch;                 ///< `Float [*, 784], Long [*]`
    std::int64_t rows = 0;             ///< maximum that runs at once
    std::int64_t predicted_bytes = 0;  ///< expected peak for that many
    std::int64_t measured_bytes = 0;   ///< measured peak; 0 until measured
  };
  std::vector<Layout> layouts;          ///< in the order of their first batches
  std::int64_t budget = 0;              ///< given, or found; 0: unknown
  std::int64_t gradient_bytes = 0;      ///< part of the budget held between micro-batches
  std::int64_t checkpoint_budget = 0;   ///< part of the budget for `CheckpointedSequential`; 0: they keep everything
  std::vector<std::int64_t> last_rows;  ///< rows of each micro-batch of the last batch
  std::int64_t replays = 0;             ///< number of times a batch was restarted with fewer rows
};

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/fitting/memory_plan.ipp>
#endif
