// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/event_file.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/watching/protobuf_message.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <exception>

#include <fcntl.h>
#include <unistd.h>

namespace gradaccum::detail {

inline constexpr std::string_view event_file_prefix = "events.out.tfevents.";
inline constexpr std::size_t event_time_digits = 10;  // equal in all names, as these are compared as strings

/// Returns the seconds since 1970 in the name of an event file; 0 if there are none.
GRADACCUM_INLINE std::int64_t time_of_event_file(std::string_view name) {
  std::int64_t seconds = 0;
  if (!name.starts_with(event_file_prefix)) return 0;
  name.remove_prefix(event_file_prefix.size());
  const auto* const end = name.data() + std::min(name.size(), event_time_digits);
  return std::from_chars(name.data(), end, seconds).ptr == end ? seconds : 0;
}

/// Returns a time after those of all files in the directory, even if two start in one second or the clock was set back.
GRADACCUM_INLINE std::int64_t time_of_next_event_file(const std::filesystem::path& directory) {
  using std::chrono::seconds, std::chrono::system_clock;
  auto time = std::chrono::duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
  for (auto& name : names_in(directory)) time = std::max(time, time_of_event_file(name) + 1);
  return std::min<std::int64_t>(time, 9'999'999'999);
}

GRADACCUM_INLINE std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == 0) return "localhost";
  std::string host(name.data());
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  std::replace_if(
      host.begin(), host.end(), [&](char c) { return !is_plain(static_cast<unsigned char>(c)); }, '_');
  return host;
}

GRADACCUM_INLINE std::string event_file_name(std::int64_t time, int number) {
  return fmt::format("{}{:0{}}.{}.{}.{}", event_file_prefix, time, event_time_digits, host_name(), ::getpid(), number);
}

GRADACCUM_INLINE EventFile::EventFile(const std::filesystem::path& directory, std::chrono::duration<double> flush_every)
    : flush_every_(flush_every) {
  make_directory(directory);
  const auto time = time_of_next_event_file(directory);
  for (int number = 0; !descriptor_ || descriptor_->number() < 0; ++number) {
    if (descriptor_ && errno != EEXIST) file_error(path_, "must be made anew", errno);  // otherwise another thread's
    path_ = directory / event_file_name(time, number);
    descriptor_.emplace(path_, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, 0666);
  }
}

GRADACCUM_INLINE EventFile::~EventFile() {
  try {
    flush();
  } catch (const std::exception&) {  // call flush() to get errors
  }
}

/// Returns TensorFlow's masked checksum, for bytes that may contain checksums.
GRADACCUM_INLINE std::uint32_t masked_crc32c(std::string_view text) {
  const auto crc = crc32c(text.data(), text.size());
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

GRADACCUM_INLINE void EventFile::add(std::string_view record) {
  constexpr std::size_t much = 1 << 20;
  std::string length;
  append_little_endian(length, record.size(), 8);
  auto framed = length;
  append_little_endian(framed, masked_crc32c(length), 4);
  framed += record;
  append_little_endian(framed, masked_crc32c(record), 4);
  waiting_ += framed;
  if (waiting_.size() >= much || Clock::now() - flushed_ >= flush_every_) flush();
}

GRADACCUM_INLINE void EventFile::flush() {
  flushed_ = Clock::now();
  cut_off_what_is_torn();
  std::size_t written = 0;
  try {
    while (written < waiting_.size()) written += write_some(std::string_view(waiting_).substr(written));
  } catch (...) {
    keep_whole_records(written);
    throw;
  }
  keep_whole_records(written);
}

GRADACCUM_INLINE std::size_t EventFile::write_some(std::string_view text) {
  for (;;) {
    const auto written = ::write(descriptor_->number(), text.data(), text.size());
    if (written > 0) return static_cast<std::size_t>(written);
    if (written == 0) errno = EIO;  // should not happen; retrying might never end
    if (errno != EINTR) file_error(path_, "must be written to", errno);
  }
}

/// Returns the size of the whole records in the first `size` bytes.
GRADACCUM_INLINE std::size_t bytes_of_whole_records(std::string_view records, std::size_t size) {
  std::size_t end = 0;
  while (end + 16 <= size) {
    std::uint64_t length = 0;
    for (std::size_t i = 8; i > 0; --i) length = length << 8 | static_cast<unsigned char>(records[end + i - 1]);
    if (length > size - end - 16) break;
    end += 16 + length;
  }
  return end;
}

GRADACCUM_INLINE void EventFile::keep_whole_records(std::size_t written) {
  const auto whole = bytes_of_whole_records(waiting_, written);
  whole_ += whole;
  waiting_.erase(0, whole);
  is_torn_ = written > whole;
  if (is_torn_ && ::ftruncate(descriptor_->number(), static_cast<off_t>(whole_)) == 0) is_torn_ = false;
}

GRADACCUM_INLINE void EventFile::cut_off_what_is_torn() {
  if (is_torn_ && ::ftruncate(descriptor_->number(), static_cast<off_t>(whole_)) != 0)
    file_error(path_, "must be cut off after its last whole record", errno);
  is_torn_ = false;
}

GRADACCUM_INLINE bool event_files_have(const std::filesystem::path& directory, std::string_view bytes) {
  for (auto& name : names_in(directory))
    if (name.starts_with(event_file_prefix) &&
        MappedFile(directory / name).text().find(bytes) != std::string_view::npos)
      return true;
  return false;
}

}  // namespace gradaccum::detail
