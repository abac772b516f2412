// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/crc32c.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <array>

namespace gradaccum::detail {

/// What a byte does to the checksum.
inline constexpr auto crc32c_table = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    auto crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78 : 0);
    table[byte] = crc;
  }
  return table;
}();

GRADACCUM_INLINE std::uint32_t crc32c(const void* data, std::size_t size) {
  std::uint32_t crc = 0xffffffff;
  for (const auto* byte = static_cast<const unsigned char*>(data); size > 0; ++byte, --size)
    crc = (crc >> 8) ^ crc32c_table[(crc ^ *byte) & 0xff];
  return ~crc;
}

}  // namespace gradaccum::detail
