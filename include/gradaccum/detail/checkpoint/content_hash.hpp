// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

namespace gradaccum::detail {

/// A number that differs between tensors whose bytes differ (but for one chance in 2^64). Waits for the device.
inline std::uint64_t content_hash(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return 0;
  const auto bytes = tensor.detach().cpu().contiguous();
  const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (std::size_t i = 0; i < bytes.nbytes(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<std::size_t>(8, bytes.nbytes() - i));
    hash = (hash ^ word) * 0xff51afd7ed558ccd;  // odd, so that no word is lost
    hash ^= hash >> 33;
  }
  return hash;
}

}  // namespace gradaccum::detail
