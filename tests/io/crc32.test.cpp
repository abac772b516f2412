// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/crc32.hpp>

#include <cstdint>
#include <vector>

namespace inner = gradaccum::detail;

namespace {

using Bytes = std::vector<unsigned char>;

// Computes as Python: x = 1; then bytes: x = (x * 1103515245 + 12345) % 2**32; x >> 16 & 255
Bytes sequence(std::size_t size) {
  Bytes bytes(size);
  std::uint32_t x = 1;
  for (auto& byte : bytes) byte = static_cast<unsigned char>((x = x * 1103515245 + 12345) >> 16);
  return bytes;
}

// Computes the CRC by definition, bit by bit.
std::uint32_t by_definition(const unsigned char* data, std::size_t size) {
  std::uint32_t crc = 0xffffffff;
  for (std::size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
  }
  return ~crc;
}

}  // namespace

TEST_CASE("crc32: known values") {
  CHECK(inner::crc32("123456789", 9) == 0xcbf43926);
  CHECK(inner::crc32("", 0) == 0);
  CHECK(inner::crc32(nullptr, 0) == 0);
  CHECK(inner::crc32(nullptr, 0, 0x12345678) == 0x12345678);
  CHECK(inner::crc32("a", 1) == 0xe8b7be43);
  CHECK(inner::crc32("abc", 3) == 0x352441c2);
}

TEST_CASE("crc32: Python's zlib.crc32") {
  CHECK(inner::crc32(Bytes(1000).data(), 1000) == 0x060b1780);
  const auto bytes = sequence(100'003);
  const auto of = [&](std::size_t size) { return inner::crc32(bytes.data(), size); };
  CHECK(of(63) == 0x08360a34);
  CHECK(of(64) == 0x3c04b8ab);
  CHECK(of(65) == 0xd4885e2a);
  CHECK(of(300) == 0xbb23997c);
  CHECK(of(100'003) == 0x40bb6194);
  Bytes all;  // the checksums of 0 to 400 bytes, lowest byte first
  for (std::size_t size = 0; size <= 400; ++size)
    for (int shift = 0; shift < 32; shift += 8) all.push_back(static_cast<unsigned char>(of(size) >> shift));
  CHECK(inner::crc32(all.data(), all.size()) == 0xca43f4d5);
}

TEST_CASE("crc32: each implementation matches the definition, at any size and address") {
  const auto bytes = sequence(1200);
  int wrong = 0;
  for (std::size_t offset = 0; offset < 17; ++offset)
    for (std::size_t size = 0; size <= 1100; size += size < 600 ? 1 : 61) {
      const auto* const data = bytes.data() + offset;
      const auto expected = by_definition(data, size);
      wrong += inner::crc32(data, size) != expected;
      wrong += ~inner::crc32_by_tables(0xffffffff, data, size) != expected;
#if defined(__x86_64__)
      if (size >= 64 && __builtin_cpu_supports("pclmul"))
        wrong += ~inner::crc32_by_folding(0xffffffff, data, size) != expected;
      if (size >= 256 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f"))
        wrong += ~inner::crc32_by_wide_folding(0xffffffff, data, size) != expected;
#endif
    }
  CHECK(wrong == 0);
}

TEST_CASE("crc32: can continue at any position") {
  const auto bytes = sequence(300);
  const auto whole = inner::crc32(bytes.data(), bytes.size());
  for (std::size_t at = 0; at <= bytes.size(); ++at) {
    const auto before = inner::crc32(bytes.data(), at);
    const auto after = inner::crc32(bytes.data() + at, bytes.size() - at);
    CHECK(inner::crc32_of_both(before, after, bytes.size() - at) == whole);
    CHECK(inner::crc32(bytes.data() + at, bytes.size() - at, before) == whole);
  }
  CHECK(inner::crc32(bytes.data() + 100, 200, 1) != inner::crc32(bytes.data() + 100, 200));  // negative control
}

#if defined(__x86_64__)
TEST_CASE("crc32: the factors equal the published ones of this polynomial") {
  STATIC_REQUIRE(inner::crc32_factor(512 + 32) == 0x154442bd4);
  STATIC_REQUIRE(inner::crc32_factor(512 - 32) == 0x1c6e41596);
  STATIC_REQUIRE(inner::crc32_factor(128 + 32) == 0x1751997d0);
  STATIC_REQUIRE(inner::crc32_factor(128 - 32) == 0x0ccaa009e);
}
#endif
