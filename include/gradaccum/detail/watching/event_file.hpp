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

/// A new file of TensorBoard's: records with their lengths and checksums, as TensorFlow frames them, each of which is a
/// serialized Event.
///
/// Readers take the files of a directory in the order of their names and do not come back to one, so its name comes
/// after all that are there. Records wait in memory, and are handed to the operating system together. A record that
/// could not be written, as the disk is full say, waits on; what there is of it in the file is cut off again.
class EventFile {
 public:
  /// Makes the directory where it is not there. Records wait no longer than `flush_every`, while more come.
  EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every);
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  /// Without a word where the last records cannot be written: call `flush` to hear of that.
  ~EventFile();

  void add(std::string_view record);
  void flush();

  const std::filesystem::path& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;

  void cut_off_what_is_torn();
  std::size_t write_some(std::string_view text);
  /// So many bytes of what waits are in the file: those of records that are whole stay.
  void keep_whole_records(std::size_t written);

  std::filesystem::path path_;
  std::optional<Descriptor> descriptor_;
  std::chrono::duration<double> flush_every_;
  Clock::time_point flushed_ = Clock::now();
  std::string waiting_;      // whole records
  std::uint64_t whole_ = 0;  // bytes of the file
  bool is_torn_ = false;     // there are more
};

/// Whether an event file in this directory has these bytes.
bool event_files_have(const std::filesystem::path& directory, std::string_view bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/event_file.ipp>
#endif
