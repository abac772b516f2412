// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/value_histogram.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// The records of an event file: messages `Event` of TensorBoard's event.proto, serialized as PyTorch's SummaryWriter
/// has them. `time`: seconds since 1970. Texts that are no UTF-8 are escaped: a reader would give up the whole file.

/// The first of a file.
std::string version_event(double time);
/// A training begins at this step: readers forget what other files have of it and of later ones. TensorBoard itself
/// does so from the second in a directory on, and other readers at each.
std::string start_event(double time, std::int64_t step);
std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value);
/// What all scalars of this tag and step have in common, whatever their times and values.
std::string bytes_of_scalar_events(std::int64_t step, std::string_view tag);
std::string histogram_event(double time, std::int64_t step, std::string_view tag, const ValueHistogram& histogram);
std::string text_event(double time, std::int64_t step, std::string_view tag, std::string_view text);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/event.ipp>
#endif
