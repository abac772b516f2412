// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// The distribution of a tensor's finite numbers, in TensorFlow's buckets, whose limits grow by a tenth.
struct ValueHistogram {
  double min = std::numeric_limits<double>::infinity(), max = -min;
  double sum = 0, sum_of_squares = 0;
  std::int64_t numbers = 0, others = 0;    // others: NaN and infinities
  std::vector<double> limits = {};         // each bucket's right end, exclusive; its left end is the previous limit
  std::vector<double> numbers_below = {};  // counts by bucket
};

/// Counts all elements times `factor`: both parts of complex ones, and those stored by a sparse tensor, duplicates
/// summed. Copies them to the host piece by piece. Waits for the device.
ValueHistogram histogram_of(const at::Tensor& tensor, double factor = 1);

/// Returns a record of an event file: TensorBoard's `Event` message, serialized like PyTorch's SummaryWriter. `time` is
/// in seconds since 1970. Texts that are not UTF-8 are escaped, since a reader would give up the whole file.
std::string scalar_event(double time, std::int64_t step, std::string_view tag, float value);
/// Returns the bytes that all scalars of this tag and step share, regardless of their times and values.
std::string bytes_of_scalar_events(std::int64_t step, std::string_view tag);

/// A new TensorBoard file of serialized Events, framed with lengths and checksums like TensorFlow's records.
///
/// Readers take the files of a directory in the order of their names and do not return to one, so the name sorts after
/// all existing ones. Records are buffered in memory and written together. A record that could not be written, for
/// example because the disk is full, stays in the buffer, and its bytes in the file are cut off.
class EventFile {
 public:
  /// Creates the directory if needed. Records wait no longer than `flush_every`, as long as others follow.
  EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every);
  /// Writes the last records, but ignores errors; call `flush` first to get them.
  ~EventFile();

  void add(std::string_view record);
  void flush();

  const std::filesystem::path& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;

  void cut_off_what_is_torn();
  std::size_t write_some(std::string_view text);
  /// Keeps the whole records among the first `written` buffered bytes, which are in the file, and cuts off the rest.
  void keep_whole_records(std::size_t written);

  std::filesystem::path path_;
  std::optional<Descriptor> descriptor_;
  std::chrono::duration<double> flush_every_;
  Clock::time_point flushed_ = Clock::now();
  std::string waiting_;      // whole records
  std::uint64_t whole_ = 0;  // bytes of whole records in the file
  bool is_torn_ = false;     // the file has part of another record
};

/// True if an event file in this directory contains these bytes.
bool event_files_have(const std::filesystem::path& directory, std::string_view bytes);

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

/// Returns the text with bytes that are not UTF-8, which readers of Protocol Buffers require, escaped like `\xff`.
std::string as_utf8(std::string_view text);

/// Returns a guard that a policy holds during a fit. It flushes the file at its end, even after an exception, and
/// ignores errors, which `at_boundary` reports. The file may be made or replaced while the fit runs.
template <class File>
std::shared_ptr<void> flush_at_end(const std::shared_ptr<File>& file) {
  return {nullptr, [&file](void*) noexcept {
            try {
              if (file) file->flush();
            } catch (const std::exception&) {
            }
          }};
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/summary_writer.ipp>
#endif
