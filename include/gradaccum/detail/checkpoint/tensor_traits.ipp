// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <ostream>

namespace gradaccum::detail {

GRADACCUM_INLINE TensorTraits::TensorTraits(const at::Tensor& tensor)
    : dtype_(tensor.scalar_type()), device_(tensor.device()) {
  if (tensor.layout() == at::kStrided) shape_ = tensor.sizes();  // other layouts may lack plain integer sizes
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const TensorTraits& traits) {
  return out << traits.dtype_ << ' ' << at::IntArrayRef(traits.shape_) << " on " << traits.device_;
}

GRADACCUM_INLINE TensorVersion::TensorVersion(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

GRADACCUM_INLINE std::uint64_t content_hash(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.scalar_type() == at::kByte) return 0;
  const auto bytes = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (std::size_t i = 0; i < bytes.nbytes(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, bytes.nbytes() - i));
    hash = (hash ^ word) * 0xff51afd7ed558ccd;  // odd, so that no bits are lost
    hash ^= hash >> 33;
  }
  return hash;
}

}  // namespace gradaccum::detail
