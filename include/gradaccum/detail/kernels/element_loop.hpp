// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Runs `body(i)` for i in [0, count) on LibTorch's intra-op threads.
void parallel_for(std::int64_t count, c10::function_ref<void(std::int64_t)> body);

/// A parallel loop over the elements of many arrays of any size. All elements are numbered consecutively and cut into
/// slices of equal size, independently of the number of threads.
class ElementLoop {
 public:
  static constexpr std::int64_t cache_line = 64;  // elements: no two slices share a line

  /// Arrays are cut at multiples of `alignment`, a divisor of `slice`.
  explicit ElementLoop(std::int64_t alignment = cache_line) : alignment_(alignment) {}

  /// Adds an array of `count` elements and returns its index.
  std::size_t add(std::int64_t count) {
    begins_.push_back(end_);
    counts_.push_back(count);
    end_ += (count + alignment_ - 1) / alignment_ * alignment_;
    return counts_.size() - 1;
  }

  std::int64_t slices() const { return (end_ + slice - 1) / slice; }

  /// Calls `body(array, from, count, slice)` for the part of each array in each slice.
  template <class Body>
  void run(const Body& body) const {
    if (slices() == 1) return run_slice(0, body);  // starting threads would take longer
    if (slices() > 1) parallel_for(slices(), [&](std::int64_t i) { run_slice(i, body); });
  }

 private:
  static constexpr std::int64_t slice = 1 << 13;  // elements: even shares, and far more work than starting a task

  template <class Body>
  void run_slice(std::int64_t i, const Body& body) const {
    const auto from = i * slice, to = std::min(from + slice, end_);
    const auto next = std::upper_bound(begins_.begin(), begins_.end(), from) - begins_.begin();
    for (auto array = static_cast<std::size_t>(next) - 1; array < begins_.size() && begins_[array] < to; ++array) {
      const auto first = std::max<std::int64_t>(from - begins_[array], 0);
      const auto count = std::min(counts_[array], to - begins_[array]) - first;
      if (count > 0) body(array, first, count, i);
    }
  }

  std::int64_t alignment_;
  std::vector<std::int64_t> begins_, counts_;
  std::int64_t end_ = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/element_loop.ipp>
#endif
