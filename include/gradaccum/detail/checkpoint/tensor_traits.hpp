// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <iosfwd>

namespace gradaccum::detail {

/// What a tensor must have in common with one that takes its place.
class TensorTraits {
 public:
  TensorTraits() = default;
  explicit TensorTraits(const at::Tensor& tensor);
  bool operator==(const TensorTraits&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const TensorTraits& traits);

 private:
  at::DimVector shape_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

/// Tells whether a tensor was changed in place since, without keeping its memory.
///
/// LibTorch makes this check for the tensors that it keeps itself, and leaves it out for those that hooks keep.
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor);
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

/// A number that differs between tensors whose bytes differ (but for one chance in 2^64). Waits for the device.
///
/// 0 for what cannot be compared: sparse tensors, and those of plain bytes, which as a rule are the workspace of a
/// library and hold whatever was there before.
std::uint64_t content_hash(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/tensor_traits.ipp>
#endif
