// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/steps.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
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

// Loops over plain memory, compiled for several instruction sets even if the program targets an old processor.

/// NEON has the results of AVX2, to the bit. The portable kernels have the same on all processors.
enum class InstructionSet { portable, neon, avx2, avx512 };

/// Returns the best instruction set according to LibTorch, which ATEN_CPU_CAPABILITY=avx2 or =default limits.
InstructionSet instruction_set();

AdafactorKernels adafactor_kernels(const OperandTypes& types, InstructionSet set = instruction_set());
/// Kernels for rows so short that padding a vector takes longer than a loop over single numbers.
AdafactorKernels narrow_adafactor_kernels(const OperandTypes& types);

SumOfSquares sum_of_squares_of(at::ScalarType dtype, InstructionSet set = instruction_set());

bool can_be_summed_here(const at::Tensor& tensor);

/// All elements of a tensor in any order; or some rows of a table, in ascending order, whose other rows are zero.
struct SquaredNumbers {
  at::Tensor values;
  at::Tensor rows = {};  ///< int64; undefined: `values` is the whole tensor
  std::int64_t rows_of_table = 0;
};

/// Computes each sum of squares (`can_be_summed_here` for the values) in one parallel loop over all elements. The bits
/// depend neither on the number of threads nor on whether zero rows are stored.
std::vector<double> sums_of_squares(const std::vector<SquaredNumbers>& all);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/kernels/kernels.ipp>
#endif
