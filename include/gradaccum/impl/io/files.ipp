// SPDX-License-Identifier: Apache-2.0
// Writes files and directories of states so that a kill leaves them whole or absent: temporary names, syncs, renames,
// locks.
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <system_error>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns a hint for the user about an error of the operating system, or "".
GRADACCUM_INLINE std::string advice(const std::error_code& error) {
  const auto is_one_of = [&](auto... conditions) { return ((error == conditions) || ...); };
  bool is_full = is_one_of(std::errc::no_space_on_device);
#ifdef EDQUOT
  is_full = is_full || error == std::error_code(EDQUOT, std::generic_category());
#endif
  if (is_full) return ": free some room";
  if (is_one_of(std::errc::file_too_large)) return ": raise the limit (ulimit -f)";
  if (is_one_of(std::errc::permission_denied, std::errc::operation_not_permitted, std::errc::read_only_file_system))
    return ": choose a place that you can write to";
  if (is_one_of(std::errc::too_many_files_open, std::errc::too_many_files_open_in_system))
    return ": close files, or raise the limit (ulimit -n)";
  return is_one_of(std::errc::io_error) ? ": check the disk" : "";
}

GRADACCUM_INLINE void file_error(const std::filesystem::path& path, const std::string& requirement,
                                 const std::error_code& error) {
  throw std::runtime_error(path.string() + ": " + requirement + ", got " + error.message() + advice(error));
}

GRADACCUM_INLINE void sync_directory(const std::filesystem::path& path) {
  const Descriptor directory(path.empty() ? "." : path, Descriptor::Open::directory);
  if (!directory) file_error(path, "must be a directory that can be opened", last_error());
  if (directory.sync()) return;
  // Some network file systems cannot sync directories, and do not need to.
  const auto error = last_error();
  if (error != std::errc::invalid_argument && error != std::errc::not_supported)
    file_error(path, "must be synced to the disk", error);
}

GRADACCUM_INLINE void make_directory(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.empty() || std::filesystem::is_directory(path, ignored)) return;
  make_directory(path.parent_path());
  std::error_code error;
  if (!std::filesystem::create_directory(path, error)) {
    if (std::filesystem::is_directory(path, ignored)) return;  // a trailing slash, or another process has just made it
    file_error(path, "must be a directory, or one that can be created", error);
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
    file_error(path, "must be a directory that can be read", error);
  return names;
}

GRADACCUM_INLINE std::filesystem::path temporary_name(std::filesystem::path path) {
  std::random_device random;
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", random());
  path += ".tmp-" + std::to_string(process_id()) + "-" + digits;
  return path;
}

/// Returns the size of a file that was opened. Throws unless it is a regular one.
GRADACCUM_INLINE std::uint64_t size_of_regular(const Descriptor& file, const std::filesystem::path& path,
                                               const char* other_kinds) {
  const auto status = file.status();
  if (!status) file_error(path, "must be a file that can be read", last_error());
  if (status->kind != Descriptor::Status::regular)
    throw std::runtime_error(path.string() + ": must be a regular file, got " +
                             (status->kind == Descriptor::Status::directory ? "a directory" : other_kinds));
  return status->bytes;
}

GRADACCUM_INLINE InputFile::InputFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(path_, Descriptor::Open::to_read_no_link) {
  if (!descriptor_ && last_error() == std::errc::too_many_symbolic_link_levels)
    throw std::runtime_error(path_.string() + ": must be a regular file, got a symbolic link");
  bytes_ = size_of_regular(descriptor_, path_, "a device, pipe or socket");
}

GRADACCUM_INLINE std::size_t InputFile::read_at(std::uint64_t offset, void* data, std::size_t size) const {
  std::size_t done = 0;
  while (done < size) {
    const auto now = descriptor_.read_at(offset + done, static_cast<char*>(data) + done, size - done);
    if (!now) file_error(path_, "must be read", last_error());
    if (*now == 0) break;
    done += *now;
  }
  return done;
}

GRADACCUM_INLINE MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor descriptor(path, Descriptor::Open::to_read);
  const auto size = static_cast<std::size_t>(size_of_regular(descriptor, path, "a pipe, socket or device"));
  if (size == 0) return;  // an empty mapping is an error
  void* const address = descriptor.map(size);
  if (!address) file_error(path, "must fit the address space", last_error());
  bytes_ = {static_cast<std::byte*>(address), size};
}

GRADACCUM_INLINE MappedFile::~MappedFile() {
  if (!bytes_.empty()) unmap(bytes_);
}

GRADACCUM_INLINE OutputFile::OutputFile(std::filesystem::path path, Cache cache)
    : path_(std::move(path)), direct_(cache == Cache::passed_by), descriptor_(path_, Descriptor::Open::new_file) {
  if (!descriptor_) fail("must be a new file that can be created");
  direct_ = direct_ && descriptor_.bypass_cache(true);
}

GRADACCUM_INLINE void OutputFile::use_cache() {
  descriptor_.bypass_cache(false);
  direct_ = false;
}

/// Returns whether a write may have failed because it bypassed the cache, for example because blocks are larger.
GRADACCUM_INLINE bool cannot_be_direct(const std::error_code& error) {
  return error == std::errc::invalid_argument || error == std::errc::operation_not_supported ||
         error == std::errc::bad_address;
}

GRADACCUM_INLINE void OutputFile::write(const void* data, std::size_t size) {
  constexpr std::size_t chunk = 1 << 18, direct_chunk = 1 << 22;
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    if (direct_ && (size < block || bytes_ % block != 0))
      use_cache();  // for the end of the file, or after a short write
    const auto written =
        descriptor_.write(bytes, direct_ ? std::min(size / block * block, direct_chunk) : std::min(size, chunk));
    if (written == 0 && direct_ && cannot_be_direct(last_error())) {
      use_cache();
      continue;
    }
    if (written == 0) fail("must be written to");
    crc32_ = detail::crc32(bytes, written, crc32_);  // while they are in the cache
    bytes_ += written;
    bytes += written;
    size -= written;
  }
}

GRADACCUM_INLINE void OutputFile::lock() const { descriptor_.lock(); }

GRADACCUM_INLINE void OutputFile::close() {
  if (!descriptor_.sync()) fail("must be synced to the disk");
  if (!descriptor_.close()) fail("must be closed");
}

GRADACCUM_INLINE void OutputFile::fail(const std::string& requirement) {
  const auto error = last_error();
  descriptor_.close();
  file_error(path_, requirement, error);
}

/// Makes the name of a file or folder that was renamed survive a power failure.
GRADACCUM_INLINE void sync_name(const std::filesystem::path& path, const char* result) {
  try {
    sync_directory(path.parent_path());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() + ": " + result + " after a power failure: " + error.what());
  }
}

/// Returns the process in a temporary name of `path`; 0 for other names.
GRADACCUM_INLINE int process_in_name(const std::filesystem::path& path, std::string_view name) {
  const auto prefix = path.filename().string() + ".tmp-";
  int process = 0;
  if (!name.starts_with(prefix)) return 0;
  const auto* const end = name.data() + name.size();
  const auto* const digits = std::from_chars(name.data() + prefix.size(), end, process).ptr;
  const std::string_view random(digits, static_cast<std::size_t>(end - digits));
  const bool is_one =
      random.size() == 9 && random[0] == '-' && random.find_first_not_of("0123456789abcdef", 1) == random.npos;
  return is_one && process > 0 ? process : 0;
}

/// Removes the temporary files of writers of `path` that were killed. A writer that is alive, even on another machine
/// or in another container, holds a lock.
GRADACCUM_INLINE void remove_temporaries_of_killed(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::error_code ignored;  // an unreadable folder may be writable
  for (std::filesystem::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const auto process = process_in_name(path, entry->path().filename().string());
    if (process == 0 || may_run(process)) continue;
    std::error_code kept;
    if (const Descriptor file(entry->path(), Descriptor::Open::to_lock); file && file.lock())
      std::filesystem::remove(entry->path(), kept);
  }
}

/// Throws an error that names `blamed`.
GRADACCUM_INLINE void rename(const std::filesystem::path& from, const std::filesystem::path& to,
                             const std::filesystem::path& blamed, const char* requirement) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  if (error) file_error(blamed, requirement, error);
}

GRADACCUM_INLINE void make_new_folder(const std::filesystem::path& path, const std::filesystem::path& blamed,
                                      const char* requirement) {
  std::error_code error;
  if (!std::filesystem::create_directory(path, error))
    file_error(blamed, requirement, error ? error : std::make_error_code(std::errc::file_exists));
}

GRADACCUM_INLINE void make_and_rename(const std::filesystem::path& temporary, const std::filesystem::path& path,
                                      const std::function<void()>& make, const char* requirement) {
  remove_temporaries_of_killed(path);
  try {
    const NoWriteSignals no_signals;
    make();
    rename(temporary, path, path, requirement);
  } catch (...) {
    std::error_code ignored;  // a later sweep removes a state that cannot be removed now
    std::filesystem::remove_all(temporary, ignored);
    throw;
  }
}

GRADACCUM_INLINE void replace_file(const std::filesystem::path& path, const std::function<void(OutputFile&)>& write) {
  const auto temporary = temporary_name(path);
  make_and_rename(temporary, path, [&] {
    OutputFile file(temporary);
    file.lock();
    write(file);
    file.close();
  });
  sync_name(path, "is replaced, but might not be so");
}

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

GRADACCUM_INLINE StateLock::StateLock(const std::filesystem::path& directory)
    : Descriptor(directory, Open::directory), owner_(process_id()) {
  if (!*this) file_error(directory, "must be a directory that can be opened", last_error());
  // Other errors mean a file system without locks; there the user has to ensure that there is one writer.
  if (!lock() && last_error() == std::errc::operation_would_block)
    throw std::runtime_error(directory.string() + ": must have only one writer, but another process or thread is " +
                             "writing to it: wait for it, or choose another directory");
}

GRADACCUM_INLINE StateLock::~StateLock() {
  if (is_own()) unlock();
}

GRADACCUM_INLINE bool StateLock::is_own() const { return owner_ == process_id(); }

GRADACCUM_INLINE void check_is_writable(const std::filesystem::path& directory) {
  const auto probe = temporary_name(directory / StateName().text()), renamed = temporary_name(probe);
  const auto make = [&] {
    make_directory(directory);
    make_new_folder(probe, directory, "must be a directory that can be written to");
    OutputFile file(probe / "probe");
    file.write("probe", 5);
    file.close();
  };
  make_and_rename(probe, renamed, make, "must be in a directory whose folders can be renamed");
  std::error_code error;
  std::filesystem::remove_all(renamed, error);
  if (error) file_error(directory, "must be a directory whose folders can be removed", error);
}

GRADACCUM_INLINE std::vector<StateDirectory::State> StateDirectory::finished() const {
  std::vector<State> states;
  std::error_code ignored;
  for (const auto& name : names_in(path_))
    if (const auto state = StateName::of(name); state && std::filesystem::is_directory(path_ / name, ignored))
      states.push_back({*state, path_ / name});
  std::sort(states.begin(), states.end());
  return states;
}

/// Picks a name after all states of that step, so that the newest state sorts last.
GRADACCUM_INLINE StateName next_name(const std::filesystem::path& directory, std::int64_t step) {
  StateName name{step, 0};
  for (const auto& other : names_in(directory))
    if (const auto taken = StateName::of(other); taken && taken->step == step)
      name.repeat = std::max(name.repeat, taken->repeat + 1);
  return name;
}

GRADACCUM_INLINE std::vector<std::filesystem::path> leftovers_in(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& name : names_in(directory))
    if (const auto at = name.find(".tmp-"); at != name.npos && StateName::of(std::string_view(name).substr(0, at)))
      paths.push_back(directory / name);
  return paths;
}

GRADACCUM_INLINE void remove_leftovers(const std::filesystem::path& directory) {
  const auto paths = leftovers_in(directory);
  if (paths.empty()) return;
  // Otherwise a power failure could bring back the name of a removed state without all of its files.
  sync_directory(directory);
  std::error_code ignored;  // network file systems keep files that are being read; the next sweep removes them
  for (const auto& path : paths) std::filesystem::remove_all(path, ignored);
}

GRADACCUM_INLINE UnfinishedState::UnfinishedState(const std::filesystem::path& directory, std::int64_t step)
    : lock_(directory) {
  remove_leftovers(directory);
  path_ = directory / next_name(directory, step).text();
  folder_ = temporary_name(path_);
  make_new_folder(folder_, folder_, "must be a folder that can be created");
}

GRADACCUM_INLINE UnfinishedState::~UnfinishedState() {
  std::error_code ignored;  // a later sweep removes the rest
  if (!folder_.empty() && lock_.is_own()) std::filesystem::remove_all(folder_, ignored);
}

GRADACCUM_INLINE std::filesystem::path UnfinishedState::finish() {
  sync_directory(folder_);
  rename(folder_, path_, path_, "must be given its name");
  folder_.clear();
  sync_name(path_, "is written, but might not be there");
  return path_;
}

GRADACCUM_INLINE std::unique_ptr<UnfinishedState> StateDirectory::begin(std::int64_t step) const {
  if (step < 0) throw std::runtime_error(path_.string() + ": step must be >= 0, got " + std::to_string(step));
  make_directory(path_);
  return std::make_unique<UnfinishedState>(path_, step);
}

GRADACCUM_INLINE std::filesystem::path StateDirectory::replace(const std::filesystem::path& older,
                                                               const std::filesystem::path& newer) {
  const auto before = StateName::of(older.filename().string()), now = StateName::of(newer.filename().string());
  if (!before || !now || before->step != now->step) return newer;
  const StateLock lock(path_);
  rename(older, temporary_name(older), older, "must be removed");
  rename(newer, older, newer, "must be given its name");
  remove_leftovers(path_);
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
    rename(path, temporary_name(path), path, "must be removed");
  }
  remove_leftovers(path_);
}

GRADACCUM_INLINE void StateDirectory::sweep() const {
  if (leftovers_in(path_).empty()) return;
  const StateLock lock(path_);
  remove_leftovers(path_);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
