// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

/// Files and directories as the operating system has them. All throws `std::runtime_error` with a path.

namespace gradaccum::detail {

/// `path: requirement, got No space left on device: free some room`
[[noreturn]] void file_error(const std::filesystem::path& path, const std::string& requirement, int error);

/// An open file or directory, closed at the end; negative where it could not be opened (see errno).
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, mode_t mode = 0);
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  int number() const { return number_; }

  /// Whether all went well. Never tried again: Linux closes even when it reports an error.
  bool close() noexcept;

 private:
  int number_;
};

/// Makes the names in a directory outlive a power failure.
void sync_directory(const std::filesystem::path& path);

/// Makes it, and those it is in, where they are not there, so that they outlive a power failure.
void make_directory(const std::filesystem::path& path);

/// The names in a directory, in no order; none where it does not exist.
std::vector<std::string> names_in(const std::filesystem::path& path);

/// `path` + ".tmp-<process>-<random>": a name beside it that nobody else uses.
std::filesystem::path temporary_name(std::filesystem::path path);

/// A regular file, read from its beginning to its end. A symbolic link is none, nor is a pipe, which could be waited
/// for for ever.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);

  /// Its size when it was opened.
  std::uint64_t bytes() const { return bytes_; }

  /// How many bytes were read, from this place on: fewer than `size` only at the end. By several threads at a time.
  std::size_t read_at(std::uint64_t place, void* data, std::size_t size) const;
  /// The same from where the last ended.
  std::size_t read(void* data, std::size_t size);

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
};

/// The bytes of a file, read from the disk when they are looked at. Writing to them does not change the file: the pages
/// written to become this process's own.
///
/// A file that is replaced or removed stays as it was here. One that another process shortens takes its pages with it:
/// looking at them ends this process (SIGBUS).
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

  /// Lets go of what memory these bytes of it, once read, are kept in; whoever looks at them reads them again.
  void release(std::span<const std::byte> bytes) const;

 private:
  std::span<std::byte> bytes_;
};

/// A new file, written from its beginning to its end, with its CRC-32. It is whole, and will be after a power failure,
/// once `close` has returned and its directory is synced; without `close` it is to be thrown away.
///
/// After an error there is no going on: the operating system reports lost data only once, so that a second `close`
/// would look well.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);

  void write(const void* data, std::size_t size);
  void close();

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t crc32() const { return crc32_; }

 private:
  std::size_t write_some(const char* data, std::size_t size);
  [[noreturn]] void fail(const std::string& requirement);

  std::filesystem::path path_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
  std::uint32_t crc32_ = 0;
};

/// Writes a file in place of what `path` names, if anything: `write` into a temporary file beside it, which then gets
/// its name. Killed at any moment, `path` is the old file or the new one.
void replace_file(const std::filesystem::path& path, const std::function<void(OutputFile&)>& write);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/files.ipp>
#endif
