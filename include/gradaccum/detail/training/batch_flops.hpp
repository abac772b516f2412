// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/training/any_batch.hpp>
#include <gradaccum/flop_counter.hpp>

#include <c10/util/FunctionRef.h>

#include <string>
#include <unordered_map>

namespace gradaccum::detail {

/// Counts the FLOP of micro-batches: by the first one of each layout, and by each one whose layout is unknown.
class BatchFlops {
 public:
  /// Runs a pass over the batch, which returns false if it had no backward. Returns its FLOP.
  double of(const AnyBatch& batch, c10::function_ref<bool()> pass) {
    const auto layout = batch.layout();
    if (const auto known = by_layout_.find(layout); known != by_layout_.end()) return pass(), known->second;
    const FlopCounter counter;
    const bool is_whole = pass();
    const auto flops = static_cast<double>(counter.get_total_flops());
    if (is_whole && !layout.empty()) by_layout_[layout] = flops;
    return flops;
  }

 private:
  std::unordered_map<std::string, double> by_layout_;
};

}  // namespace gradaccum::detail
