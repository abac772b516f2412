// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace gradaccum::detail {

/// What ranks tell each other when a window closes: their own, or the sums over all of them.
struct WindowTotals {
  double weight = 0;  ///< sum of the weights of the micro-batches
  double active = 0;  ///< has closed a window of its own, and did not only follow others
  double samples = 0, micro_batches = 0;
  double loss = 0;           ///< mean over the window, times its weight
  double stop = 0;           ///< wants to end the training
  double signal = 0;         ///< has got SIGTERM, or the like
  double running = 0;        ///< is in the middle of its window: all send the gradients of one more micro-batch
  double unsent = 0;         ///< has gradients that no backward has sent
  std::vector<double> used;  ///< by parameter: has a gradient
};

}  // namespace gradaccum::detail
