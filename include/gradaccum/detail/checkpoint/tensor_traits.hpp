// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

#include <ostream>

namespace gradaccum::detail {

/// What a tensor must have in common with one that takes its place.
class TensorTraits {
 public:
  TensorTraits() = default;
  explicit TensorTraits(const at::Tensor& tensor) : dtype_(tensor.scalar_type()), device_(tensor.device()) {
    if (tensor.layout() == at::kStrided) shape_ = tensor.sizes();  // others may have no sizes that are plain numbers
  }
  bool operator==(const TensorTraits&) const = default;

  friend std::ostream& operator<<(std::ostream& out, const TensorTraits& traits) {
    return out << traits.dtype_ << ' ' << at::IntArrayRef(traits.shape_) << " on " << traits.device_;
  }

 private:
  at::DimVector shape_;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

}  // namespace gradaccum::detail
