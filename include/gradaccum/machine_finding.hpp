// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace gradaccum {

/// One thing by which a machine and a process may lose time, and the line of code that mends it.
struct MachineFinding {
  std::string what = {};  ///< `float32 products`
  std::string seen = {};  ///< `34 GFLOP/s a thread by MKL, 78 by oneDNN`
  double loss = 1;        ///< how many times slower it is than it could be; 1 where nothing is lost, or was measured
  std::string cure = {};  ///< what to write, and why; empty where there is nothing to mend

  bool ok() const { return cure.empty(); }
};

}  // namespace gradaccum
