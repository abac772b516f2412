// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/sample.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace gradaccum::detail {

GRADACCUM_INLINE std::uint64_t sample_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.numel() == 0)
    return 0;
  const auto* const bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  if (!bytes) return 0;
  const std::size_t all =
      tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : static_cast<std::size_t>(tensor.element_size());
  const std::size_t size = std::min(all, sizeof(std::uint64_t)), last = all - size;
  constexpr std::size_t most = 8;
  const std::size_t places = last == 0 ? 1 : most;
  std::uint64_t sample = 1, odd = 0x9E3779B97F4A7C15ULL;  // an odd factor keeps any change of one word
  for (std::size_t i = 0; i < places; ++i, odd += 2 * 0xBF58476D1CE4E5B9ULL) {
    std::uint64_t word = 0;
    const auto* const place = bytes + last * i / (most - 1);
    size == sizeof(word) ? std::memcpy(&word, place, sizeof(word)) : std::memcpy(&word, place, size);
    sample += word * odd;
  }
  return sample;
}

}  // namespace gradaccum::detail
