// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/padded_sequences.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/copied_to.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void check_sequence(const char* what, std::size_t i, const at::Tensor& sequence,
                                     const at::Tensor& first) {
  TORCH_CHECK(sequence.defined() && sequence.dim() > 0, "LengthBuckets: ", what,
              " must have a first dimension, their length; number ", i, " has none");
  const bool like_first = sequence.scalar_type() == first.scalar_type() && sequence.device() == first.device() &&
                          sequence.sizes().slice(1) == first.sizes().slice(1);
  TORCH_CHECK(like_first, "LengthBuckets: ", what, " must be alike but for their length; number 0 is ",
              first.scalar_type(), " ", first.sizes(), " on ", first.device(), ", number ", i, " is ",
              sequence.scalar_type(), " ", sequence.sizes(), " on ", sequence.device());
}

/// Throws if the padding does not fit an integer dtype: ATen would silently round 0.5, and wrap -100 to 156.
GRADACCUM_INLINE void check_padding(const char* option, const at::Scalar& padding, at::ScalarType dtype) {
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) return;
  const auto value = at::full({}, padding, at::TensorOptions(dtype)).item<double>();
  TORCH_CHECK(value == padding.toDouble(), "LengthBuckets: ", option, " must fit the dtype that it pads, ", dtype,
              ", got ", padding.toDouble());
}

GRADACCUM_INLINE PaddedSequences::PaddedSequences(const char* what, const char* padding_option,
                                                  std::vector<at::Tensor> sequences, const at::Scalar& padding,
                                                  std::int64_t multiple)
    : sequences_(std::move(sequences)), multiple_(multiple) {
  TORCH_CHECK(multiple_ >= 1, "LengthBuckets: pad_to_multiple_of must be >= 1, got ", multiple_);
  lengths_.reserve(sequences_.size());
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    check_sequence(what, i, sequences_[i], sequences_.front());
    lengths_.push_back(sequences_[i].size(0));
  }
  if (sequences_.empty()) return;
  check_padding(padding_option, padding, sequences_.front().scalar_type());
  auto shape = sequences_.front().sizes().vec();
  shape.front() = 1;
  padding_ = at::full(shape, padding, sequences_.front().options());
}

GRADACCUM_INLINE at::Tensor PaddedSequences::lengths(const std::vector<std::int64_t>& rows) const {
  std::vector<std::int64_t> result;
  for (auto row : rows) result.push_back(length(row));
  return at::tensor(result);
}

GRADACCUM_INLINE at::Tensor PaddedSequences::padded(const std::vector<std::int64_t>& rows) const {
  std::int64_t longest = 0;
  for (auto row : rows) longest = std::max(longest, padded_length(row));
  std::vector<at::Tensor> joined{padding_};
  const auto places = at::zeros({static_cast<std::int64_t>(rows.size()), longest}, at::TensorOptions(at::kLong));
  auto* place = places.data_ptr<std::int64_t>();
  std::int64_t next = 1;
  for (auto row : rows) {
    joined.push_back(sequences_[static_cast<std::size_t>(row)]);
    std::iota(place, place + length(row), next);
    place += longest;
    next += length(row);
  }
  const auto flat = at::cat(joined);
  return flat.index_select(0, copied_to(flat.device(), places.flatten())).unflatten(0, places.sizes());
}

}  // namespace gradaccum::detail
