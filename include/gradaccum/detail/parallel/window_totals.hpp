// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace gradaccum::detail {

/// The numbers that ranks exchange when a window closes: one rank's, or the sums over all. Flags are 1 or 0.
struct WindowTotals {
  double weight = 0;  ///< sum of the weights of the micro-batches
  double active = 0;  ///< flag: has closed its own window, rather than only joined others
  double samples = 0, micro_batches = 0;
  double loss = 0;           ///< mean over the window, times its weight
  double stop = 0;           ///< flag: requests the end of the training
  double signal = 0;         ///< flag: has received SIGTERM or a similar signal
  double running = 0;        ///< flag: is inside a window, so that all send the gradients of one more micro-batch
  double unsent = 0;         ///< flag: has gradients that no backward has sent
  std::vector<double> used;  ///< flags by parameter: has a gradient
};

}  // namespace gradaccum::detail
