// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace bloom {

/// A folder that appears only when it is complete: it is filled under a temporary name next to it, and `finish` renames
/// it. Leftovers of a killed process are removed by the next process that makes the same folder.
class NewFolder {
 public:
  /// @throws std::runtime_error if the path exists, or another process is making it.
  explicit NewFolder(const std::filesystem::path& path) : path_(without_slash(path)), partial_(path_) {
    const auto status = std::filesystem::symlink_status(path_);
    if (exists(status) && !(is_directory(status) && std::filesystem::is_empty(path_)))
      throw std::runtime_error(path_.string() + ": must not exist yet, or be an empty folder");
    partial_ += ".partial";
    std::filesystem::create_directories(partial_);
    lock();
    for (const auto& entry : std::filesystem::directory_iterator(partial_)) std::filesystem::remove_all(entry);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder() {
    std::error_code ignored;
    if (!partial_.empty()) std::filesystem::remove_all(partial_, ignored);
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  /// Returns the temporary folder to write to.
  const std::filesystem::path& partial() const { return partial_; }

  /// Writes all files to the disk, so that they survive a power failure, and then renames the folder.
  void finish() {
    if (::syncfs(descriptor_) != 0) fail("must be written to the disk", errno);
    std::filesystem::rename(partial_, path_);
    partial_.clear();
  }

 private:
  static std::filesystem::path without_slash(const std::filesystem::path& path) {
    const auto plain = std::filesystem::absolute(path).lexically_normal();
    return plain.has_filename() ? plain : plain.parent_path();
  }

  /// Locks the temporary folder until this process ends, normally or not.
  void lock() {
    descriptor_ = ::open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    if (error == EWOULDBLOCK) fail("must be this process's alone, and another is writing to it", error);
    fail("must be a folder that can be opened", error);
  }

  [[noreturn]] void fail(const std::string& requirement, int error) const {
    throw std::runtime_error(partial_.string() + ": " + requirement + ", got '" + std::strerror(error) + "'");
  }

  std::filesystem::path path_, partial_;
  int descriptor_ = -1;
};

}  // namespace bloom
