// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/crc32_kernels.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// The CRC-32 of zlib (in Python: `zlib.crc32`); `before`: that of the bytes before these.
inline std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0) {
  const auto* const bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") != 0;
  if (can_fold && size >= 64) return ~crc32_by_folding(~before, bytes, size);
#endif
  return ~crc32_by_tables(~before, bytes, size);
}

}  // namespace gradaccum::detail
