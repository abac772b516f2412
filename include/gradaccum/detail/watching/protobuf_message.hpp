// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// A message of Protocol Buffers (proto3), field after field: as the official libraries write it where fields come in
/// the order of their numbers.
class ProtobufMessage {
 public:
  // Of a field that is not there a reader takes 0, so these are left out where they are 0.
  ProtobufMessage& whole(std::uint32_t field, std::int64_t number);
  ProtobufMessage& real(std::uint32_t field, double number);

  // These are always there: one of several alternatives, say.
  ProtobufMessage& single(std::uint32_t field, float number);
  ProtobufMessage& bytes(std::uint32_t field, std::string_view bytes);
  ProtobufMessage& message(std::uint32_t field, const ProtobufMessage& message) { return bytes(field, message.text_); }

  /// A list, left out where it is empty.
  ProtobufMessage& reals(std::uint32_t field, const std::vector<double>& numbers);

  const std::string& text() const { return text_; }

 private:
  void begin(std::uint32_t field, unsigned kind) { varint(std::uint64_t{field} << 3 | kind); }
  void varint(std::uint64_t number);

  std::string text_;
};

/// The lowest byte first, as Protocol Buffers and TensorFlow's records have it.
void append_little_endian(std::string& text, std::uint64_t number, int bytes);

/// A text as it is where it is UTF-8, which readers of Protocol Buffers insist on; of what is none, `\xff` for a byte.
std::string as_utf8(std::string_view text);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/protobuf_message.ipp>
#endif
