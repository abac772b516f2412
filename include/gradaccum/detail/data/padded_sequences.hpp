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
  /// `what`: how errors name them. `padding_option`: what the user sets, where the padding does not fit the dtype.
  PaddedSequences(const char* what, const char* padding_option, std::vector<at::Tensor> sequences,
                  const at::Scalar& padding);

  std::int64_t size() const { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }

  /// int64 [n], on the CPU.
  at::Tensor lengths(const std::vector<std::int64_t>& rows) const;
  /// [n, longest, …]. Two operations, however many the sequences are.
  at::Tensor padded(const std::vector<std::int64_t>& rows) const;

 private:
  std::vector<at::Tensor> sequences_;
  std::vector<std::int64_t> lengths_;
  at::Tensor padding_;  // one element of a sequence: [1, …]
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/padded_sequences.ipp>
#endif
