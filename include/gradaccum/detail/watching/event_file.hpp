// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// A new TensorBoard file of serialized Events, framed with lengths and checksums like TensorFlow's records.
///
/// Readers take the files of a directory in the order of their names and do not return to one, so the name sorts after
/// all existing ones. Records are buffered in memory and written together. A record that could not be written, for
/// example because the disk is full, stays in the buffer, and its bytes in the file are cut off.
class EventFile {
 public:
  /// Creates the directory if needed. Records wait no longer than `flush_every`, as long as others follow.
  EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/event_file.ipp>
#endif
