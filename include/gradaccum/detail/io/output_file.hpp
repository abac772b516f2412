// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/descriptor.hpp>
#include <gradaccum/detail/io/directory.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace gradaccum::detail {

/// A new file, written from its beginning to its end, with its CRC-32. It is whole, and will be after a power failure,
/// once `close` has returned and its directory is synced; without `close` it is to be thrown away.
///
/// Throws `std::runtime_error` with the file's name. After an error there is no going on: the operating system reports
/// lost data only once, so that a second `close` would look well.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path)
      : path_(std::move(path)), descriptor_(path_, O_WRONLY | O_CREAT | O_EXCL, 0666) {
    if (descriptor_.number() < 0) fail("must be made anew");
  }

  void write(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const auto written = write_some(bytes, std::min(size, chunk));
      crc32_ = detail::crc32(bytes, written, crc32_);  // now, while they are in the cache
      bytes_ += written;
      bytes += written;
      size -= written;
    }
  }

  void close() {
    if (!sync(descriptor_)) fail("must be synced to the disk");
    if (!descriptor_.close()) fail("must be closed");
  }

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t crc32() const { return crc32_; }

 private:
  static constexpr std::size_t chunk = 1 << 18;

  std::size_t write_some(const char* data, std::size_t size) {
    for (;;) {
      const auto written = ::write(descriptor_.number(), data, size);
      if (written > 0) return static_cast<std::size_t>(written);
      if (written == 0) errno = EIO;  // which no file should do: tried again, it might be for ever
      if (errno != EINTR) fail("must be written to");
    }
  }

  [[noreturn]] void fail(const std::string& requirement) {
    const int error = errno;
    descriptor_.close();
    file_error(path_, requirement, error);
  }

  std::filesystem::path path_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
  std::uint32_t crc32_ = 0;
};

/// Writes a file in place of what `path` names, if anything: `write(OutputFile&)` into a temporary file beside it,
/// which then gets its name. Killed at any moment, `path` is the old file or the new one.
template <class Write>
void replace_file(const std::filesystem::path& path, const Write& write) {
  const auto temporary = temporary_name(path);
  try {
    OutputFile file(temporary);
    write(file);
    file.close();
    if (std::rename(temporary.c_str(), path.c_str()) != 0) file_error(path, "must be replaced (is as before)", errno);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
  try {
    sync_directory(path.parent_path());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() +
                             ": is replaced, but might not be so after a power failure: " + error.what());
  }
}

}  // namespace gradaccum::detail
