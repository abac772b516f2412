// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns a hint for the user about an error of the operating system, or "".
GRADACCUM_INLINE std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return ": free some room";
    case EFBIG:
      return ": raise the limit (ulimit -f)";
    case EACCES:
    case EPERM:
    case EROFS:
      return ": choose a place that you may write to";
    case EMFILE:
    case ENFILE:
      return ": close files, or raise the limit (ulimit -n)";
    case EIO:
      return ": look after the disk";
    default:
      return "";
  }
}

GRADACCUM_INLINE void file_error(const std::filesystem::path& path, const std::string& requirement, int error) {
  throw std::runtime_error(path.string() + ": " + requirement + ", got " + std::generic_category().message(error) +
                           advice(error));
}

GRADACCUM_INLINE Descriptor::Descriptor(const std::filesystem::path& path, int flags, mode_t mode) {
  do number_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  while (number_ < 0 && errno == EINTR);
}

GRADACCUM_INLINE bool Descriptor::close() noexcept {
  return number_ < 0 || ::close(std::exchange(number_, -1)) == 0 || errno == EINTR;
}

GRADACCUM_INLINE bool sync(const Descriptor& descriptor) {
  int result = 0;
  do result = ::fsync(descriptor.number());
  while (result != 0 && errno == EINTR);
  return result == 0;
}

GRADACCUM_INLINE void sync_directory(const std::filesystem::path& path) {
  const Descriptor directory(path.empty() ? "." : path, O_RDONLY | O_DIRECTORY);
  if (directory.number() < 0) file_error(path, "must be a directory that can be opened", errno);
  // Some network file systems cannot sync directories, and do not need to.
  if (!sync(directory) && errno != EINVAL && errno != ENOTSUP) file_error(path, "must be synced to the disk", errno);
}

GRADACCUM_INLINE void make_directory(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_directory(path, ignored)) return;
  make_directory(path.parent_path());
  if (::mkdir(path.c_str(), 0777) != 0) {
    const int error = errno;
    if (std::filesystem::is_directory(path, ignored)) return;  // a trailing slash, or another process has just made it
    file_error(path, "must be a directory, or be made", error);
  }
  try {
    sync_directory(path.parent_path());
  } catch (...) {
    std::filesystem::remove(path, ignored);  // otherwise the next call would assume that it is synced
    throw;
  }
}

GRADACCUM_INLINE std::vector<std::string> names_in(const std::filesystem::path& path) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory)
    file_error(path, "must be a directory that can be read", error.value());
  return names;
}

GRADACCUM_INLINE std::filesystem::path temporary_name(std::filesystem::path path) {
  std::random_device random;
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", random());
  path += ".tmp-" + std::to_string(::getpid()) + "-" + digits;
  return path;
}

[[noreturn]] GRADACCUM_INLINE void fail_as_not_regular(const std::filesystem::path& path, const char* kind) {
  throw std::runtime_error(path.string() + ": must be a regular file, got " + kind);
}

GRADACCUM_INLINE InputFile::InputFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK) {
  if (descriptor_.number() < 0 && errno == ELOOP) fail_as_not_regular(path_, "a symbolic link");
  if (descriptor_.number() < 0) file_error(path_, "must be a file that can be read", errno);
  struct ::stat status {};
  if (::fstat(descriptor_.number(), &status) != 0) file_error(path_, "must be a file that can be read", errno);
  if (S_ISDIR(status.st_mode)) fail_as_not_regular(path_, "a directory");
  if (!S_ISREG(status.st_mode)) fail_as_not_regular(path_, "a device, pipe or socket");
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

/// Reads until `size` bytes are there or the file ends; `read(done)` reads what follows the first `done` bytes.
template <class Read>
std::size_t read_all(const std::filesystem::path& path, std::size_t size, const Read& read) {
  std::size_t done = 0;
  while (done < size) {
    const auto now = read(done);
    if (now == 0) break;
    if (now > 0) done += static_cast<std::size_t>(now);
    if (now < 0 && errno != EINTR) file_error(path, "must be read", errno);
  }
  return done;
}

GRADACCUM_INLINE std::size_t InputFile::read_at(std::uint64_t place, void* data, std::size_t size) const {
  return read_all(path_, size, [&](std::size_t done) {
    return ::pread(descriptor_.number(), static_cast<char*>(data) + done, size - done,
                   static_cast<off_t>(place + done));
  });
}

GRADACCUM_INLINE std::size_t InputFile::read(void* data, std::size_t size) {
  return read_all(path_, size, [&](std::size_t done) {
    return ::read(descriptor_.number(), static_cast<char*>(data) + done, size - done);
  });
}

GRADACCUM_INLINE MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor descriptor(path, O_RDONLY | O_NONBLOCK);  // otherwise opening a pipe waits for a writer
  struct ::stat status {};
  if (descriptor.number() < 0 || ::fstat(descriptor.number(), &status) != 0)
    file_error(path, "must be a file that can be read", errno);
  if (!S_ISREG(status.st_mode))
    fail_as_not_regular(path, S_ISDIR(status.st_mode) ? "a directory" : "a pipe, socket or device");
  if (status.st_size == 0) return;  // mmap rejects size 0
  const auto size = static_cast<std::size_t>(status.st_size);
  // Without NORESERVE Linux reserves memory for a copy of the whole file, and refuses files larger than the memory.
  void* const address =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor.number(), 0);
  if (address == MAP_FAILED) file_error(path, "must fit the address space", errno);
  bytes_ = {static_cast<std::byte*>(address), size};
}

GRADACCUM_INLINE MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

GRADACCUM_INLINE void MappedFile::release(std::span<const std::byte> bytes) const {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()), end = begin + bytes.size();
  const auto first = (begin + page - 1) / page * page, last = end / page * page;  // only whole pages
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

GRADACCUM_INLINE OutputFile::OutputFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(path_, O_WRONLY | O_CREAT | O_EXCL, 0666) {
  if (descriptor_.number() < 0) fail("must be made anew");
}

GRADACCUM_INLINE void OutputFile::write(const void* data, std::size_t size) {
  constexpr std::size_t chunk = 1 << 18;
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = write_some(bytes, std::min(size, chunk));
    crc32_ = detail::crc32(bytes, written, crc32_);  // while they are in the cache
    bytes_ += written;
    bytes += written;
    size -= written;
  }
}

GRADACCUM_INLINE void OutputFile::close() {
  if (!sync(descriptor_)) fail("must be synced to the disk");
  if (!descriptor_.close()) fail("must be closed");
}

GRADACCUM_INLINE std::size_t OutputFile::write_some(const char* data, std::size_t size) {
  for (;;) {
    const auto written = ::write(descriptor_.number(), data, size);
    if (written > 0) return static_cast<std::size_t>(written);
    if (written == 0) errno = EIO;  // should never happen; a retry might loop forever
    if (errno != EINTR) fail("must be written to");
  }
}

GRADACCUM_INLINE void OutputFile::fail(const std::string& requirement) {
  const int error = errno;
  descriptor_.close();
  file_error(path_, requirement, error);
}

GRADACCUM_INLINE void replace_file(const std::filesystem::path& path, const std::function<void(OutputFile&)>& write) {
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

#undef GRADACCUM_INLINE
