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

/// The properties that a tensor must share with one that takes its place.
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

/// Detects whether a tensor was changed in place since construction, without keeping its memory.
///
/// LibTorch checks this for tensors that it saves itself, but not for those that hooks save.
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor);
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

/// A hash of a tensor's bytes: different bytes collide with a chance of 2^-64. Waits for the device.
///
/// Returns 0 for tensors that cannot be compared: sparse ones, and uint8 ones, which are usually a library's workspace
/// and hold arbitrary old bytes.
std::uint64_t content_hash(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/tensor_traits.ipp>
#endif
