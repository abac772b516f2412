// SPDX-License-Identifier: Apache-2.0
// Reads a batch of any class: its tensors, its number of samples, its kind of rows, its device.
#pragma once

#include <gradaccum/detail/data/samples.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string fingerprint_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  auto text = plain_text(tensor.scalar_type(), " ", tensor.sizes());
  if (tensor.layout() != at::kStrided || tensor.numel() == 0) return text;
  const auto numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return text + " #" + std::to_string(crc32(numbers.const_data_ptr(), numbers.nbytes()));
}

GRADACCUM_INLINE std::int64_t rows_of_all(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), "a batch that is split must have a tensor, got none");
  for (auto& tensor : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.dim() > 0,
                "every tensor of a batch that is split must have a first dimension, its rows, got ",
                tensor.defined() ? "a 0-dim tensor" : "an undefined tensor");
    TORCH_CHECK(tensor.size(0) == tensors[0].size(0), "all tensors of a batch must have the same number of rows, got ",
                tensors[0].size(0), " and ", tensor.size(0));
  }
  return tensors[0].size(0);
}

GRADACCUM_INLINE std::string layout_text_of(const at::Tensor& tensor, bool any_rows) {
  if (!tensor.defined()) return "none";
  std::string sizes;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    sizes += (i ? ", " : "") + (any_rows && i == 0 ? "*" : std::to_string(tensor.size(i)));
  auto text = std::string(c10::toString(tensor.scalar_type())) + " [" + sizes + "]";
  if (!tensor.is_cpu()) text += " on " + c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
  return text;
}

GRADACCUM_INLINE std::string layout_text(const at::Tensor& tensor) {
  auto text = layout_text_of(tensor, false);
  if (!tensor.defined() || tensor.is_contiguous()) return text;
  text += " strides";
  for (const auto stride : tensor.strides()) text += " " + std::to_string(stride);
  return text;
}

/// Omits strides, since tensors of a batch are made contiguous.
GRADACCUM_INLINE std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows) {
  std::string text;
  for (auto& tensor : tensors) text += (text.empty() ? "" : ", ") + layout_text_of(tensor, any_rows);
  return text;
}

GRADACCUM_INLINE PaddedSequences::PaddedSequences(const char* what, const char* padding_option,
                                                  std::vector<at::Tensor> sequences, const at::Scalar& padding,
                                                  std::int64_t multiple)
    : sequences_(std::move(sequences)), multiple_(multiple) {
  TORCH_CHECK(multiple_ >= 1, "LengthBuckets: pad_to_multiple_of must be >= 1, got ", multiple_);
  lengths_.reserve(sequences_.size());
  for (std::size_t i = 0; i < sequences_.size(); ++i) {
    const auto &one = sequences_[i], &first = sequences_.front();
    TORCH_CHECK(one.defined() && one.dim() > 0, "LengthBuckets: ", what,
                " must have a first dimension, their length; number ", i, " has none");
    TORCH_CHECK(one.scalar_type() == first.scalar_type() && one.device() == first.device() &&
                    one.sizes().slice(1) == first.sizes().slice(1),
                "LengthBuckets: ", what, " must be alike except for their length; number 0 is ", first.scalar_type(),
                " ", first.sizes(), " on ", first.device(), ", number ", i, " is ", one.scalar_type(), " ", one.sizes(),
                " on ", one.device());
    lengths_.push_back(one.size(0));
  }
  if (sequences_.empty()) return;
  auto shape = sequences_.front().sizes().vec();
  shape.front() = 1;
  padding_ = at::full(shape, padding, sequences_.front().options());
  // In an integer dtype ATen would silently round 0.5, and wrap -100 to 156.
  const auto dtype = sequences_.front().scalar_type();
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) return;
  const auto value = at::full({}, padding, at::TensorOptions(dtype)).item<double>();
  TORCH_CHECK(value == padding.toDouble(), "LengthBuckets: ", padding_option, " must fit the dtype that it pads, ",
              dtype, ", got ", padding.toDouble());
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

/// Copies to the host synchronously, because readers there do not wait for a copy.
GRADACCUM_INLINE at::Tensor brought_to(c10::Device device, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  if (tensor.is_cpu() && tensor.layout() == at::kStrided) return copied_to(device, tensor);
  return tensor.to(device, /*non_blocking=*/device.is_cuda());
}

GRADACCUM_INLINE void cannot_be_brought(const std::type_info& type) {
  TORCH_CHECK(false,
              "Prefetch: with .device, a batch must consist of tensors: one, a tuple, range or map of them, or a "
              "struct of only .data and .target; got ",
              name_of_class(type), "; give that class a member Batch to(at::Device) const");
}

GRADACCUM_INLINE RowKind kind_of(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  RowKind kind;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    kind.form += c10::toString(tensor.scalar_type()) + std::to_string(tensor.dim());
    for (std::int64_t i = 1; i < tensor.dim(); ++i) kind.sizes.push_back(tensor.size(i));
    kind.elements += tensor.numel() / std::max<std::int64_t>(rows, 1);
  }
  kind.text = layout_text(tensors, /*any_rows=*/true);
  return kind;
}

GRADACCUM_INLINE bool RowKind::covers(const RowKind& other) const {
  return form == other.form && std::ranges::equal(sizes, other.sizes, std::ranges::greater_equal());
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
