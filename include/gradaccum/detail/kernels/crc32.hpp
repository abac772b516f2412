// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// Returns zlib's CRC-32 (in Python: `zlib.crc32`), continued from `before`, the checksum of earlier bytes.
std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before = 0);

/// Returns the CRC-32 of two consecutive ranges, the second of `size` bytes, from their CRC-32s.
std::uint32_t crc32_of_both(std::uint32_t first, std::uint32_t second, std::uint64_t size);

/// Returns the CRC-32C of iSCSI and TensorFlow's records, which uses Castagnoli's polynomial.
std::uint32_t crc32c(const void* data, std::size_t size);

/// The polynomials in reflected order, with the highest power in the lowest bit, like the checksums.
inline constexpr std::uint32_t crc32_polynomial = 0xedb88320, crc32c_polynomial = 0x82f63b78;

/// Returns x times a remainder, modulo the polynomial.
constexpr std::uint32_t crc32_times_x(std::uint32_t crc, std::uint32_t polynomial = crc32_polynomial) {
  return (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
}

/// Returns the remainder after `size` more bytes, modulo either polynomial. Processes eight bytes per step, on any
/// processor.
std::uint32_t crc32_by_tables(std::uint32_t crc, const unsigned char* data, std::size_t size,
                              std::uint32_t polynomial = crc32_polynomial);

#if defined(__x86_64__)
/// Returns x^n modulo the polynomial, as a factor of a 64-bit half. A product of two halves has 127 bits, so it begins
/// one bit too early, which the shift corrects.
constexpr long long crc32_factor(int n) {
  std::uint32_t power = 0x80000000;  // x^0
  for (int i = 0; i < n; ++i) power = crc32_times_x(power);
  return static_cast<long long>(power) << 1;
}

/// Computes the remainder of at least 64 bytes by multiplication without carries (pclmul), 64 bytes per step.
__attribute__((target("pclmul"))) std::uint32_t crc32_by_folding(std::uint32_t crc, const unsigned char* data,
                                                                 std::size_t size);
/// Computes the remainder of at least 256 bytes with vectors of 64 bytes, 256 bytes per step. Without it, loading a
/// state takes a quarter longer, and with tables only three times as long.
__attribute__((target("vpclmulqdq,avx512f"))) std::uint32_t crc32_by_wide_folding(std::uint32_t crc,
                                                                                  const unsigned char* data,
                                                                                  std::size_t size);
#endif

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/kernels/crc32.ipp>
#endif
