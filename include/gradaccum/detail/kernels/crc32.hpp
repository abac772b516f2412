// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/crc32_kernels.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// The CRC-32 of zlib (in Python: `zlib.crc32`); `before`: that of the bytes before these.
inline std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0) {
  const auto* const bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") != 0;
  static const bool can_fold_wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f");
  if (can_fold_wide && size >= 256) return ~crc32_by_wide_folding(~before, bytes, size);
  if (can_fold && size >= 64) return ~crc32_by_folding(~before, bytes, size);
#endif
  return ~crc32_by_tables(~before, bytes, size);
}

/// The CRC-32 of bytes and `size` more, from that of each.
inline std::uint32_t crc32_of_both(std::uint32_t first, std::uint32_t second, std::uint64_t size) {
  std::uint32_t distance = 0x80000000, power = 0x00800000;  // 1, and x^8: a byte
  for (; size > 0; size >>= 1, power = crc32_product(power, power))
    if (size & 1) distance = crc32_product(distance, power);
  return crc32_product(distance, first) ^ second;
}

}  // namespace gradaccum::detail
