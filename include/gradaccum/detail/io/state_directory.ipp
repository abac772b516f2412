// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/state_directory.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string StateName::text() const {
  auto digits = std::to_string(step);
  digits.insert(0, digits.size() < 6 ? 6 - digits.size() : 0, '0');
  return "step-" + digits + (repeat > 0 ? "." + std::to_string(repeat) : "");
}

GRADACCUM_INLINE std::optional<StateName> StateName::of(std::string_view text) {
  StateName name;
  if (!text.starts_with("step-")) return {};
  const auto* const end = text.data() + text.size();
  const auto step = std::from_chars(text.data() + 5, end, name.step);
  if (step.ptr != end && *step.ptr == '.') std::from_chars(step.ptr + 1, end, name.repeat);
  const bool has_next = name.repeat < std::numeric_limits<std::int64_t>::max();
  if (name.step < 0 || !has_next || name.text() != text) return {};
  return name;
}

GRADACCUM_INLINE bool of_one_step(const std::filesystem::path& one, const std::filesystem::path& other) {
  const auto first = StateName::of(one.filename().string()), second = StateName::of(other.filename().string());
  return first && second && first->step == second->step;
}

/// Locks the directory for this writer until destruction or the end of the process.
class StateLock {
 public:
  explicit StateLock(const std::filesystem::path& path) : directory_(path, O_RDONLY | O_DIRECTORY) {
    if (directory_.number() < 0) file_error(path, "must be a directory that can be opened", errno);
    // Other errors mean a file system without locks; there the user has to ensure that there is one writer.
    if (::flock(directory_.number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw std::runtime_error(path.string() + ": must have one writer, and is being written to by another process " +
                               "or thread: wait for it, or choose another directory");
  }

 private:
  Descriptor directory_;
};

GRADACCUM_INLINE std::vector<StateDirectory::State> StateDirectory::finished() const {
  std::vector<State> states;
  std::error_code ignored;
  for (const auto& name : names_in(path_))
    if (const auto state = StateName::of(name); state && std::filesystem::is_directory(path_ / name, ignored))
      states.push_back({*state, path_ / name});
  std::sort(states.begin(), states.end());
  return states;
}

GRADACCUM_INLINE std::filesystem::path StateDirectory::add(
    std::int64_t step, const std::function<void(const std::filesystem::path&)>& write) {
  if (step < 0) throw std::runtime_error(path_.string() + ": step must be >= 0, got " + std::to_string(step));
  make_directory(path_);
  const StateLock lock(path_);
  remove_leftovers();
  const auto path = name_for(step), unfinished = temporary_name(path);
  if (::mkdir(unfinished.c_str(), 0777) != 0) file_error(unfinished, "must be made", errno);
  try {
    write(unfinished);
    sync_directory(unfinished);
    if (std::rename(unfinished.c_str(), path.c_str()) != 0) file_error(unfinished, "must be given its name", errno);
  } catch (...) {
    std::error_code ignored;  // a later sweep removes what cannot be removed now
    std::filesystem::remove_all(unfinished, ignored);
    throw;
  }
  try {
    sync_directory(path_);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() +
                             ": is written, but might not be there after a power failure: " + error.what());
  }
  return path;
}

/// Picks a name after all states of that step, so that the newest state sorts last.
GRADACCUM_INLINE std::filesystem::path StateDirectory::name_for(std::int64_t step) const {
  StateName name{step, 0};
  for (const auto& other : names_in(path_))
    if (const auto taken = StateName::of(other); taken && taken->step == step)
      name.repeat = std::max(name.repeat, taken->repeat + 1);
  return path_ / name.text();
}

GRADACCUM_INLINE std::filesystem::path StateDirectory::replace(const std::filesystem::path& older,
                                                               const std::filesystem::path& newer) {
  const StateLock lock(path_);
  if (std::rename(older.c_str(), temporary_name(older).c_str()) != 0) file_error(older, "must be removed", errno);
  if (std::rename(newer.c_str(), older.c_str()) != 0) file_error(newer, "must be given its name", errno);
  remove_leftovers();
  return older;
}

GRADACCUM_INLINE void StateDirectory::keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others) {
  if (count < 1) throw std::runtime_error(path_.string() + ": must keep >= 1 states, got " + std::to_string(count));
  if (finished().empty()) return;
  const StateLock lock(path_);
  const auto states = finished();
  for (std::size_t i = 0; i + static_cast<std::uint64_t>(count) < states.size(); ++i) {
    const auto& path = states[i].path;
    if (std::find(others.begin(), others.end(), path) != others.end()) continue;
    if (std::rename(path.c_str(), temporary_name(path).c_str()) != 0) file_error(path, "must be removed", errno);
  }
  remove_leftovers();
}

GRADACCUM_INLINE void StateDirectory::sweep() const {
  if (leftovers().empty()) return;
  const StateLock lock(path_);
  remove_leftovers();
}

GRADACCUM_INLINE std::vector<std::filesystem::path> StateDirectory::leftovers() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& name : names_in(path_))
    if (const auto at = name.find(".tmp-"); at != name.npos && StateName::of(std::string_view(name).substr(0, at)))
      paths.push_back(path_ / name);
  return paths;
}

GRADACCUM_INLINE void StateDirectory::remove_leftovers() const {
  const auto paths = leftovers();
  if (paths.empty()) return;
  // Otherwise a power failure could bring back the name of a removed state without all of its files.
  sync_directory(path_);
  std::error_code ignored;  // network file systems keep files that are being read; the next sweep removes them
  for (const auto& path : paths) std::filesystem::remove_all(path, ignored);
}

}  // namespace gradaccum::detail
