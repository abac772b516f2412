// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/event.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/protobuf_message.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE ProtobufMessage begun_event(double time, std::int64_t step) {
  return ProtobufMessage().real(1, time).whole(2, step);
}

GRADACCUM_INLINE std::string summary_event(double time, std::int64_t step, const ProtobufMessage& value) {
  return begun_event(time, step).message(5, ProtobufMessage().message(1, value)).text();
}

GRADACCUM_INLINE ProtobufMessage begun_value(std::string_view tag) { return ProtobufMessage().bytes(1, as_utf8(tag)); }

GRADACCUM_INLINE std::string version_event(double time) {
  return begun_event(time, 0).bytes(3, "brain.Event:2").text();
}

GRADACCUM_INLINE std::string start_event(double time, std::int64_t step) {
  constexpr std::int64_t start = 1;
  return begun_event(time, step).message(7, ProtobufMessage().whole(1, start)).text();
}

GRADACCUM_INLINE std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value) {
  return summary_event(time, step, begun_value(tag).single(2, value));
}

/// Cuts off the time at the beginning and the value at the end.
GRADACCUM_INLINE std::string bytes_of_scalar_events(std::int64_t step, std::string_view tag) {
  const auto event = scalar_event(1, step, tag, 0);
  return event.substr(1 + sizeof(double), event.size() - 1 - sizeof(double) - sizeof(float));
}

GRADACCUM_INLINE std::string histogram_event(double time, std::int64_t step, std::string_view tag,
                                             const ValueHistogram& histogram) {
  ProtobufMessage message;
  message.real(1, histogram.min).real(2, histogram.max).real(3, static_cast<double>(histogram.numbers));
  message.real(4, histogram.sum).real(5, histogram.sum_of_squares);
  message.reals(6, histogram.limits).reals(7, histogram.numbers_below);
  return summary_event(time, step, begun_value(tag).message(5, message));
}

/// Makes a tensor of one text, which the text plugin shows.
GRADACCUM_INLINE std::string text_event(double time, std::int64_t step, std::string_view tag, std::string_view text) {
  constexpr std::int64_t texts = 7;
  const auto shape = ProtobufMessage().message(2, ProtobufMessage().whole(1, 1));
  const auto tensor = ProtobufMessage().whole(1, texts).message(2, shape).bytes(8, as_utf8(text));
  const auto metadata = ProtobufMessage().message(1, ProtobufMessage().bytes(1, "text"));
  return summary_event(time, step, begun_value(tag).message(8, tensor).message(9, metadata));
}

}  // namespace gradaccum::detail
