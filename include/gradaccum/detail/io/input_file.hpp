// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/descriptor.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gradaccum::detail {

/// A regular file, read from its beginning to its end. A symbolic link is none, nor is a pipe, which could be waited
/// for for ever. Throws `std::runtime_error` with the file's name.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path)
      : path_(std::move(path)), descriptor_(path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK) {
    if (descriptor_.number() < 0 && errno == ELOOP) fail_as("a symbolic link");
    if (descriptor_.number() < 0) file_error(path_, "must be a file that can be read", errno);
    struct stat status {};
    if (::fstat(descriptor_.number(), &status) != 0) file_error(path_, "must be a file that can be read", errno);
    if (S_ISDIR(status.st_mode)) fail_as("a directory");
    if (!S_ISREG(status.st_mode)) fail_as("a device, pipe or socket");
    bytes_ = static_cast<std::uint64_t>(status.st_size);
  }

  /// Its size when it was opened.
  std::uint64_t bytes() const { return bytes_; }

  /// How many bytes were read, from this place on: fewer than `size` only at the end. By several threads at a time.
  std::size_t read_at(std::uint64_t place, void* data, std::size_t size) const {
    return read_all(size, [&](std::size_t done) {
      return ::pread(descriptor_.number(), static_cast<char*>(data) + done, size - done,
                     static_cast<off_t>(place + done));
    });
  }
  /// The same from where the last ended.
  std::size_t read(void* data, std::size_t size) {
    return read_all(size, [&](std::size_t done) {
      return ::read(descriptor_.number(), static_cast<char*>(data) + done, size - done);
    });
  }

 private:
  template <class Read>
  std::size_t read_all(std::size_t size, const Read& read) const {
    std::size_t done = 0;
    while (done < size) {
      const auto now = read(done);
      if (now == 0) break;
      if (now > 0) done += static_cast<std::size_t>(now);
      if (now < 0 && errno != EINTR) file_error(path_, "must be read", errno);
    }
    return done;
  }

  [[noreturn]] void fail_as(const char* kind) const {
    throw std::runtime_error(path_.string() + ": must be a regular file, got " + kind);
  }

  std::filesystem::path path_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
};

}  // namespace gradaccum::detail
