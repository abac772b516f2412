// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstddef>
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
  std::vector<double> used;  ///< by parameter: has a gradient

  at::Tensor to_tensor() const {
    std::vector<double> all{weight, active, samples, micro_batches, loss, stop, signal};
    all.insert(all.end(), used.begin(), used.end());
    return at::tensor(all, at::kDouble);
  }
  static WindowTotals from_tensor(const at::Tensor& tensor) {
    const auto* const all = tensor.const_data_ptr<double>();
    return {all[0], all[1], all[2], all[3], all[4], all[5], all[6], std::vector<double>(all + 7, all + tensor.numel())};
  }
};

}  // namespace gradaccum::detail
