// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace gradaccum::detail {

/// What to do about an error of the operating system, where that is known.
inline std::string advice(int error) {
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

/// `path: requirement, got No space left on device: free some room`
[[noreturn]] inline void file_error(const std::filesystem::path& path, const std::string& requirement, int error) {
  throw std::runtime_error(path.string() + ": " + requirement + ", got " + std::generic_category().message(error) +
                           advice(error));
}

/// An open file or directory, closed at the end; negative where it could not be opened (see errno).
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, mode_t mode = 0) {
    do number_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
    while (number_ < 0 && errno == EINTR);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  int number() const { return number_; }

  /// Whether all went well. Never tried again: Linux closes even when it reports an error.
  bool close() noexcept { return number_ < 0 || ::close(std::exchange(number_, -1)) == 0 || errno == EINTR; }

 private:
  int number_;
};

inline bool sync(const Descriptor& descriptor) {
  int result = 0;
  do result = ::fsync(descriptor.number());
  while (result != 0 && errno == EINTR);
  return result == 0;
}

}  // namespace gradaccum::detail
