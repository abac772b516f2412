// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gradaccum {

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
