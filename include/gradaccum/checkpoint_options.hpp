// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gradaccum {

/// How a checkpointed part is run again.
struct CheckpointOptions {
  /// Random generators go back to where they were in the forward pass, so that dropout drops the same. Without it, a
  /// part that draws no random numbers is a microsecond faster.
  bool preserve_rng = true;
  /// The recomputation ends with the last tensor that backward needs, rather than with the part.
  bool early_stop = true;
  /// Compares all bytes that were saved with those that are recomputed, not just shapes, dtypes and devices: to find a
  /// part that does not do the same twice. Slow: it reads everything twice, and waits for the device.
  bool check_content = false;
};

}  // namespace gradaccum
