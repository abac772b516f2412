// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace gradaccum {

/// What `FitMemory` has found: how many rows go at once, and what that takes; prints itself. All in bytes, beyond what
/// was there before an update: activations, and the gradients that the update gathers.
struct MemoryPlan {
  /// Batches whose rows are alike.
  struct Layout {
    std::string batch;                 ///< `Float [*, 784], Long [*]`
    std::int64_t rows = 0;             ///< the most that go at once
    std::int64_t predicted_bytes = 0;  ///< the peak that was expected of so many
    std::int64_t measured_bytes = 0;   ///< the peak that was seen; 0: not yet
  };
  std::vector<Layout> layouts;          ///< in the order that they were met
  std::int64_t budget = 0;              ///< given, or found; 0: nobody tells how much there is
  std::int64_t gradient_bytes = 0;      ///< of the budget, held from a micro-batch to the next
  std::int64_t checkpoint_budget = 0;   ///< of the budget, what `CheckpointedSequential` parts keep; 0: all they need
  std::vector<std::int64_t> last_rows;  ///< of each micro-batch of the last batch
  std::int64_t replays = 0;             ///< how often a batch was begun again with fewer rows
};

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/memory_plan.ipp>
#endif
