// SPDX-License-Identifier: Apache-2.0
// Computes checksums of files: CRC-32 by tables, by carry-less products, or by instructions for it.
#pragma once

#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/platform/platform.hpp>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <cstring>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns the product of two remainders.
constexpr std::uint32_t crc32_product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1, b = crc32_times_x(b))
    if ((a & 0x80000000) != 0) product ^= b;
  return product;
}

/// tables[k][b]: the effect of a byte b on the checksum after k more bytes.
template <std::uint32_t polynomial>
inline constexpr auto crc32_tables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    tables[0][byte] = byte;
    for (int bit = 0; bit < 8; ++bit) tables[0][byte] = crc32_times_x(tables[0][byte], polynomial);
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  return tables;
}();

GRADACCUM_INLINE std::uint32_t crc32_by_tables(std::uint32_t crc, const unsigned char* data, std::size_t size,
                                               std::uint32_t polynomial) {
  const auto& tables =
      polynomial == crc32_polynomial ? crc32_tables<crc32_polynomial> : crc32_tables<crc32c_polynomial>;
  for (; size >= 8; data += 8, size -= 8)
    crc = tables[7][(crc ^ data[0]) & 0xff] ^ tables[6][(crc >> 8 ^ data[1]) & 0xff] ^
          tables[5][(crc >> 16 ^ data[2]) & 0xff] ^ tables[4][crc >> 24 ^ data[3]] ^ tables[3][data[4]] ^
          tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__)

/// Adds the effect of 16 bytes to the bytes that begin `bits` later. Its halves are `bits + 64` and `bits` away from
/// them; both exponents are 32 less, since a factor has 32 bits where a half has 64.
template <int bits>
__attribute__((target("pclmul"))) inline __m128i crc32_fold(__m128i from, const unsigned char* to) {
  constexpr long long first = crc32_factor(bits + 32), second = crc32_factor(bits - 32);
  const auto factors = _mm_set_epi64x(second, first);
  const auto products = _mm_xor_si128(_mm_clmulepi64_si128(from, factors, 0x00),   // the first halves
                                      _mm_clmulepi64_si128(from, factors, 0x11));  // the second halves
  return _mm_xor_si128(products, _mm_loadu_si128(reinterpret_cast<const __m128i*>(to)));
}

/// Applies `crc32_fold` to four times 16 bytes.
template <int bits>
__attribute__((target("vpclmulqdq,avx512f"))) inline __m512i crc32_fold_wide(__m512i from, const unsigned char* to) {
  constexpr long long first = crc32_factor(bits + 32), second = crc32_factor(bits - 32);
  const auto factors = _mm512_set_epi64(second, first, second, first, second, first, second, first);
  const auto products =
      _mm512_xor_si512(_mm512_clmulepi64_epi128(from, factors, 0x00), _mm512_clmulepi64_epi128(from, factors, 0x11));
  return _mm512_xor_si512(products, _mm512_loadu_si512(to));
}

__attribute__((target("pclmul"))) GRADACCUM_INLINE std::uint32_t crc32_by_folding(std::uint32_t crc,
                                                                                  const unsigned char* data,
                                                                                  std::size_t size) {
  // Uses four chains, as each step of one depends on the previous. In the end they have the remainder of all but the
  // last bytes.
  __m128i chains[4];
  std::memcpy(chains, data, sizeof chains);
  chains[0] = _mm_xor_si128(chains[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) chains[i] = crc32_fold<512>(chains[i], data + 16 * i);
  }
  return crc32_by_tables(crc32_by_tables(0, reinterpret_cast<unsigned char*>(chains), sizeof chains), data, size);
}

__attribute__((target("vpclmulqdq,avx512f"))) GRADACCUM_INLINE std::uint32_t crc32_by_wide_folding(
    std::uint32_t crc, const unsigned char* data, std::size_t size) {
  __m512i chains[4];
  std::memcpy(chains, data, sizeof chains);
  chains[0] = _mm512_xor_si512(chains[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) chains[i] = crc32_fold_wide<2048>(chains[i], data + 64 * i);
  }
  return crc32_by_tables(crc32_by_tables(0, reinterpret_cast<unsigned char*>(chains), sizeof chains), data, size);
}

#elif defined(__aarch64__) && defined(__GNUC__)

/// Uses assembly, because the compilers name the instructions differently.
GRADACCUM_INLINE std::uint32_t crc32_by_instruction(std::uint32_t crc, const unsigned char* data, std::size_t size,
                                                    std::uint32_t polynomial) {
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    if (polynomial == crc32_polynomial)
      __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    else
      __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  }
  return crc32_by_tables(crc, data, size, polynomial);
}

#endif

/// Returns the remainder, computed in the fastest way that this processor has.
GRADACCUM_INLINE std::uint32_t crc32_remainder(std::uint32_t crc, const unsigned char* data, std::size_t size,
                                               std::uint32_t polynomial) {
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") != 0;
  static const bool can_fold_wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f");
  const bool has_factors = polynomial == crc32_polynomial;
  if (has_factors && can_fold_wide && size >= 256) return crc32_by_wide_folding(crc, data, size);
  if (has_factors && can_fold && size >= 64) return crc32_by_folding(crc, data, size);
#elif defined(__aarch64__) && defined(__GNUC__)
  static const bool has_instruction = arm_features().crc32;
  if (has_instruction) return crc32_by_instruction(crc, data, size, polynomial);
#endif
  return crc32_by_tables(crc, data, size, polynomial);
}

GRADACCUM_INLINE std::uint32_t crc32(const void* data, std::size_t size, std::uint32_t before) {
  return ~crc32_remainder(~before, static_cast<const unsigned char*>(data), size, crc32_polynomial);
}

GRADACCUM_INLINE std::uint32_t crc32c(const void* data, std::size_t size) {
  return ~crc32_remainder(~0u, static_cast<const unsigned char*>(data), size, crc32c_polynomial);
}

GRADACCUM_INLINE std::uint32_t crc32_of_both(std::uint32_t first, std::uint32_t second, std::uint64_t size) {
  std::uint32_t distance = 0x80000000, power = 0x00800000;  // 1, and x^8: a byte
  for (; size > 0; size >>= 1, power = crc32_product(power, power))
    if (size & 1) distance = crc32_product(distance, power);
  return crc32_product(distance, first) ^ second;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
