// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// The CRC-32 of zlib (in Python: `zlib.crc32`); `before`: that of the bytes before these.
std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0);

/// The CRC-32 of bytes and `size` more, from that of each.
std::uint32_t crc32_of_both(std::uint32_t first, std::uint32_t second, std::uint64_t size);

/// The CRC-32C of iSCSI and of TensorFlow's records: another polynomial than zlib's, Castagnoli's.
std::uint32_t crc32c(const void* data, std::size_t size);

/// The polynomials, their highest power in the lowest bit, as all bits of the checksum are.
inline constexpr std::uint32_t crc32_polynomial = 0xedb88320, crc32c_polynomial = 0x82f63b78;

/// x times a remainder, modulo the polynomial.
constexpr std::uint32_t crc32_times_x(std::uint32_t crc, std::uint32_t polynomial = crc32_polynomial) {
  return (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
}

/// The remainder after `size` more bytes, modulo one of the two; eight a step, on any processor.
std::uint32_t crc32_by_tables(std::uint32_t crc, const unsigned char* data, std::size_t size,
                              std::uint32_t polynomial = crc32_polynomial);

#if defined(__x86_64__)
/// x^n modulo the polynomial, as a factor of a 64-bit half: a product of two halves has 127 bits, and so begins a bit
/// too early, which the shift mends.
constexpr long long crc32_factor(int n) {
  std::uint32_t power = 0x80000000;  // x^0
  for (int i = 0; i < n; ++i) power = crc32_times_x(power);
  return static_cast<long long>(power) << 1;
}

/// The remainder by multiplication without carries (pclmul), 64 bytes a step. At least 64 bytes.
__attribute__((target("pclmul"))) std::uint32_t crc32_by_folding(std::uint32_t crc, const unsigned char* data,
                                                                 std::size_t size);
/// The remainder with vectors of 64 bytes, 256 a step. At least 256 bytes. Loading a state without it takes a quarter
/// longer, and with tables alone three times as long.
__attribute__((target("vpclmulqdq,avx512f"))) std::uint32_t crc32_by_wide_folding(std::uint32_t crc,
                                                                                  const unsigned char* data,
                                                                                  std::size_t size);
#endif

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/kernels/crc32.ipp>
#endif
