// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/protobuf_message.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <bit>
#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE void append_little_endian(std::string& text, std::uint64_t number, int bytes) {
  for (; bytes > 0; --bytes, number >>= 8) text += static_cast<char>(number & 0xff);
}

GRADACCUM_INLINE void ProtobufMessage::varint(std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) text_ += static_cast<char>((number & 0x7f) | 0x80);
  text_ += static_cast<char>(number);
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::whole(std::uint32_t field, std::int64_t number) {
  if (number == 0) return *this;
  begin(field, 0);
  varint(static_cast<std::uint64_t>(number));
  return *this;
}

/// Writes -0, unlike 0.
GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::real(std::uint32_t field, double number) {
  const auto bits = std::bit_cast<std::uint64_t>(number);
  if (bits == 0) return *this;
  begin(field, 1);
  append_little_endian(text_, bits, 8);
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::single(std::uint32_t field, float number) {
  begin(field, 5);
  append_little_endian(text_, std::bit_cast<std::uint32_t>(number), 4);
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::bytes(std::uint32_t field, std::string_view bytes) {
  begin(field, 2);
  varint(bytes.size());
  text_ += bytes;
  return *this;
}

GRADACCUM_INLINE ProtobufMessage& ProtobufMessage::reals(std::uint32_t field, const std::vector<double>& numbers) {
  if (numbers.empty()) return *this;
  begin(field, 2);
  varint(8 * numbers.size());
  for (const double number : numbers) append_little_endian(text_, std::bit_cast<std::uint64_t>(number), 8);
  return *this;
}

/// Returns the number of bytes of the first character, by table 3-7 of the Unicode standard; 0 if it is invalid.
GRADACCUM_INLINE std::size_t utf8_character_bytes(std::string_view text) {
  const auto is_in = [text](std::size_t place, unsigned lowest, unsigned highest) {
    if (place >= text.size()) return false;
    const auto byte = static_cast<unsigned char>(text[place]);
    return byte >= lowest && byte <= highest;
  };
  const auto follows = [&](std::size_t place) { return is_in(place, 0x80, 0xbf); };
  if (is_in(0, 0x00, 0x7f)) return 1;
  if (is_in(0, 0xc2, 0xdf)) return follows(1) ? 2 : 0;
  if (is_in(0, 0xe0, 0xef))  // neither overlong nor a UTF-16 surrogate
    return is_in(1, is_in(0, 0xe0, 0xe0) ? 0xa0 : 0x80, is_in(0, 0xed, 0xed) ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
  if (!is_in(0, 0xf0, 0xf4)) return 0;
  const bool is_second = is_in(1, is_in(0, 0xf0, 0xf0) ? 0x90 : 0x80, is_in(0, 0xf4, 0xf4) ? 0x8f : 0xbf);
  return is_second && follows(2) && follows(3) ? 4 : 0;
}

GRADACCUM_INLINE std::string as_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto bytes = utf8_character_bytes(text);
    if (bytes > 0) result += text.substr(0, bytes);
    if (bytes == 0) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return result;
}

}  // namespace gradaccum::detail
