// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/value_histogram.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// The records of an event file: TensorBoard's `Event` messages, serialized like PyTorch's SummaryWriter. `time` is in
/// seconds since 1970. Texts that are not UTF-8 are escaped, since a reader would give up the whole file.

/// Returns the first record of a file.
std::string version_event(double time);
/// Returns the record of a training's start: readers discard this and later steps of other files. TensorBoard itself
/// does so from the second start in a directory on, other readers at each.
std::string start_event(double time, std::int64_t step);
std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value);
/// Returns the bytes that all scalars of this tag and step share, regardless of their times and values.
std::string bytes_of_scalar_events(std::int64_t step, std::string_view tag);
std::string histogram_event(double time, std::int64_t step, std::string_view tag, const ValueHistogram& histogram);
std::string text_event(double time, std::int64_t step, std::string_view tag, std::string_view text);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/event.ipp>
#endif
