// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/descriptor.hpp>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gradaccum::detail {

/// Makes the names in a directory outlive a power failure.
inline void sync_directory(const std::filesystem::path& path) {
  const Descriptor directory(path.empty() ? "." : path, O_RDONLY | O_DIRECTORY);
  if (directory.number() < 0) file_error(path, "must be a directory that can be opened", errno);
  // Some network file systems cannot, and have no need to.
  if (!sync(directory) && errno != EINVAL && errno != ENOTSUP) file_error(path, "must be synced to the disk", errno);
}

/// Makes it, and those it is in, where they are not there, so that they outlive a power failure.
inline void make_directory(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_directory(path, ignored)) return;
  make_directory(path.parent_path());
  if (::mkdir(path.c_str(), 0777) != 0) {
    const int error = errno;
    if (std::filesystem::is_directory(path, ignored)) return;  // with a slash at the end, or made by another just now
    file_error(path, "must be a directory, or be made", error);
  }
  try {
    sync_directory(path.parent_path());
  } catch (...) {
    std::filesystem::remove(path, ignored);  // else the next call would take it for one that is synced
    throw;
  }
}

/// The names in a directory, in no order; none where it does not exist.
inline std::vector<std::string> names_in(const std::filesystem::path& path) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory)
    file_error(path, "must be a directory that can be read", error.value());
  return names;
}

/// `path` + ".tmp-<process>-<random>": a name beside it that nobody else uses.
inline std::filesystem::path temporary_name(std::filesystem::path path) {
  std::random_device random;
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", random());
  path += ".tmp-" + std::to_string(::getpid()) + "-" + digits;
  return path;
}

}  // namespace gradaccum::detail
