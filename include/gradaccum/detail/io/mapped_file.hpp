// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/descriptor.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <stdexcept>

#include <sys/mman.h>
#include <sys/stat.h>

namespace gradaccum::detail {

/// The bytes of a file, read from the disk when they are looked at. Writing to them does not change the file: the pages
/// written to become this process's own.
///
/// A file that is replaced or removed stays as it was here. One that another process shortens takes its pages with it:
/// looking at them ends this process (SIGBUS).
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const Descriptor descriptor(path, O_RDONLY | O_NONBLOCK);  // else a pipe's open waits for a writer
    struct ::stat status {};
    if (descriptor.number() < 0 || ::fstat(descriptor.number(), &status) != 0)
      file_error(path, "must be a file that can be read", errno);
    if (!S_ISREG(status.st_mode))
      throw std::runtime_error(path.string() + ": must be a regular file, got a " +
                               (S_ISDIR(status.st_mode) ? "directory" : "pipe, socket or device"));
    if (status.st_size == 0) return;  // which mmap refuses
    const auto size = static_cast<std::size_t>(status.st_size);
    // Without NORESERVE Linux wants room for a copy of all, and refuses a file larger than the memory.
    void* const address =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor.number(), 0);
    if (address == MAP_FAILED) file_error(path, "must fit the address space", errno);
    bytes_ = {static_cast<std::byte*>(address), size};
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  }

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace gradaccum::detail
