// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradaccum::detail {

/// A number that differs between tensors whose bytes differ (but for one chance in 2^64). Waits for the device.
///
/// 0 for what cannot be compared: sparse tensors, and those of plain bytes, which as a rule are the workspace of a
/// library and hold whatever was there before.
inline std::uint64_t content_hash(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.scalar_type() == at::kByte) return 0;
  const auto bytes = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
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
