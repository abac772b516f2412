// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Sequences of unequal length, any of which can be padded to the longest and joined to one tensor.
class PaddedSequences {
 public:
  /// Pads lengths to a multiple of `multiple`, >= 1. `what` names the sequences in error messages. `padding_option`
  /// names the option to change if the padding does not fit the dtype.
  PaddedSequences(const char* what, const char* padding_option, std::vector<at::Tensor> sequences,
                  const at::Scalar& padding, std::int64_t multiple);

  std::int64_t size() const { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }

  /// The padded length of a batch whose longest sequence this is.
  std::int64_t padded_length(std::int64_t i) const { return (length(i) + multiple_ - 1) / multiple_ * multiple_; }

  /// Lengths of sequences: int64 [n], on the CPU.
  at::Tensor lengths(const std::vector<std::int64_t>& rows) const;
  /// Sequences as one tensor: [n, longest padded length, …]. Takes two operations for any number of sequences.
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
