// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Sequences of unequal length, and any of them as one tensor, padded to the longest among these.
class PaddedSequences {
 public:
  /// Padded to a multiple of `multiple`, >= 1. `what`: how errors name them. `padding_option`: what the user sets,
  /// where the padding does not fit the dtype.
  PaddedSequences(const char* what, const char* padding_option, std::vector<at::Tensor> sequences,
                  const at::Scalar& padding, std::int64_t multiple);

  std::int64_t size() const { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }

  /// With its padding, if it is the longest.
  std::int64_t padded_length(std::int64_t i) const { return (length(i) + multiple_ - 1) / multiple_ * multiple_; }

  /// int64 [n], on the CPU.
  at::Tensor lengths(const std::vector<std::int64_t>& rows) const;
  /// [n, longest with its padding, …]. Two operations, however many the sequences are.
  at::Tensor padded(const std::vector<std::int64_t>& rows) const;

 private:
  std::vector<at::Tensor> sequences_;
  std::vector<std::int64_t> lengths_;
  at::Tensor padding_;  // one element of a sequence: [1, …]
  std::int64_t multiple_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/padded_sequences.ipp>
#endif
