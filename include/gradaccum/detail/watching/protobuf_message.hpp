// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// A Protocol Buffers message (proto3), written field by field. It equals the official libraries' if the fields come in
/// the order of their numbers.
class ProtobufMessage {
 public:
  // Zeros are left out, since readers take 0 for a missing field.
  ProtobufMessage& whole(std::uint32_t field, std::int64_t number);
  ProtobufMessage& real(std::uint32_t field, double number);

  // These are always written, for example as one of several alternatives.
  ProtobufMessage& single(std::uint32_t field, float number);
  ProtobufMessage& bytes(std::uint32_t field, std::string_view bytes);
  ProtobufMessage& message(std::uint32_t field, const ProtobufMessage& message) { return bytes(field, message.text_); }

  /// Writes a list unless it is empty.
  ProtobufMessage& reals(std::uint32_t field, const std::vector<double>& numbers);

  const std::string& text() const { return text_; }

 private:
  void begin(std::uint32_t field, unsigned kind) { varint(std::uint64_t{field} << 3 | kind); }
  void varint(std::uint64_t number);

  std::string text_;
};

/// Appends the lowest byte first, as in Protocol Buffers and TensorFlow's records.
void append_little_endian(std::string& text, std::uint64_t number, int bytes);

/// Returns the text with bytes that are not UTF-8, which readers of Protocol Buffers require, escaped like `\xff`.
std::string as_utf8(std::string_view text);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/protobuf_message.ipp>
#endif
