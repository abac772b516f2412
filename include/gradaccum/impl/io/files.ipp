// SPDX-License-Identifier: Apache-2.0
// Writes files and directories of states so that a kill leaves them whole or absent: temporary names, syncs, renames,
// locks.
#pragma once

#include <gradaccum/detail/io/files.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <system_error>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns a hint for the user about an error of the operating system, or "".
GRADACCUM_INLINE std::string advice(int error) {
  if (error == ENOSPC || error == EDQUOT) return ": free some room";
  if (error == EFBIG) return ": raise the limit (ulimit -f)";
  if (error == EACCES || error == EPERM || error == EROFS) return ": choose a place that you can write to";
  if (error == EMFILE || error == ENFILE) return ": close files, or raise the limit (ulimit -n)";
  return error == EIO ? ": check the disk" : "";
}

GRADACCUM_INLINE void file_error(const std::filesystem::path& path, const std::string& requirement, int error) {
  throw std::runtime_error(path.string() + ": " + requirement + ", got " + std::generic_category().message(error) +
                           advice(error));
}

GRADACCUM_INLINE Descriptor::Descriptor(const std::filesystem::path& path, int flags, mode_t mode)
    : number_(static_cast<int>(TEMP_FAILURE_RETRY(::open(path.c_str(), flags | O_CLOEXEC, mode)))) {}

GRADACCUM_INLINE sigset_t file_size_signal() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGXFSZ);
  return signals;
}

GRADACCUM_INLINE NoFileSizeSignal::NoFileSizeSignal() {
  const auto signals = file_size_signal();
  ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

/// Consumes a pending signal: the system sends it to the thread that writes, where it waits while it is blocked.
GRADACCUM_INLINE NoFileSizeSignal::~NoFileSizeSignal() {
  const int error = errno;
  const auto signals = file_size_signal();
  const ::timespec now{};
  while (!::sigismember(&before_, SIGXFSZ) && ::sigtimedwait(&signals, nullptr, &now) > 0) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

GRADACCUM_INLINE std::size_t Descriptor::write(const void* data, std::size_t size) const {
  const NoFileSizeSignal no_signal;
  const auto written = TEMP_FAILURE_RETRY(::write(number_, data, size));
  if (written == 0) errno = EIO;  // should never happen; a retry might loop forever
  return written > 0 ? static_cast<std::size_t>(written) : 0;
}

GRADACCUM_INLINE bool Descriptor::close() noexcept {
  return number_ < 0 || ::close(std::exchange(number_, -1)) == 0 || errno == EINTR;
}

GRADACCUM_INLINE bool sync(const Descriptor& descriptor) {
  return TEMP_FAILURE_RETRY(::fsync(descriptor.number())) == 0;
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

/// Returns the size of a file that was opened. Throws unless it is a regular one.
GRADACCUM_INLINE std::uint64_t size_of_regular(const Descriptor& file, const std::filesystem::path& path,
                                               const char* other_kinds) {
  struct ::stat status {};
  if (file.number() < 0 || ::fstat(file.number(), &status) != 0)
    file_error(path, "must be a file that can be read", errno);
  if (!S_ISREG(status.st_mode))
    throw std::runtime_error(path.string() + ": must be a regular file, got " +
                             (S_ISDIR(status.st_mode) ? "a directory" : other_kinds));
  return static_cast<std::uint64_t>(status.st_size);
}

GRADACCUM_INLINE InputFile::InputFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(path_, O_RDONLY | O_NOFOLLOW | O_NONBLOCK) {
  if (descriptor_.number() < 0 && errno == ELOOP)
    throw std::runtime_error(path_.string() + ": must be a regular file, got a symbolic link");
  bytes_ = size_of_regular(descriptor_, path_, "a device, pipe or socket");
}

GRADACCUM_INLINE std::size_t InputFile::read_at(std::uint64_t offset, void* data, std::size_t size) const {
  std::size_t done = 0;
  while (done < size) {
    const auto now = TEMP_FAILURE_RETRY(
        ::pread(descriptor_.number(), static_cast<char*>(data) + done, size - done, static_cast<off_t>(offset + done)));
    if (now < 0) file_error(path_, "must be read", errno);
    if (now == 0) break;
    done += static_cast<std::size_t>(now);
  }
  return done;
}

GRADACCUM_INLINE MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor descriptor(path, O_RDONLY | O_NONBLOCK);  // otherwise opening a pipe waits for a writer
  const auto size = static_cast<std::size_t>(size_of_regular(descriptor, path, "a pipe, socket or device"));
  if (size == 0) return;  // mmap rejects it
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

GRADACCUM_INLINE OutputFile::OutputFile(std::filesystem::path path, Cache cache)
    : path_(std::move(path)),
      direct_(cache == Cache::passed_by),
      descriptor_(path_, O_WRONLY | O_CREAT | O_EXCL, 0666) {
  if (descriptor_.number() < 0) fail("must be a new file that can be created");
  direct_ = direct_ && ::fcntl(descriptor_.number(), F_SETFL, O_DIRECT) == 0;  // not every file system has it
}

GRADACCUM_INLINE void OutputFile::use_cache() {
  ::fcntl(descriptor_.number(), F_SETFL, 0);
  direct_ = false;
}

GRADACCUM_INLINE void OutputFile::write(const void* data, std::size_t size) {
  constexpr std::size_t chunk = 1 << 18, direct_chunk = 1 << 22;
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    if (direct_ && (size < block || bytes_ % block != 0))
      use_cache();  // for the end of the file, or after a short write
    const auto written =
        descriptor_.write(bytes, direct_ ? std::min(size / block * block, direct_chunk) : std::min(size, chunk));
    if (written == 0 && direct_ && (errno == EINVAL || errno == EOPNOTSUPP || errno == EFAULT)) {  // e.g. larger blocks
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

GRADACCUM_INLINE void OutputFile::lock() const { ::flock(descriptor_.number(), LOCK_EX | LOCK_NB); }

GRADACCUM_INLINE void OutputFile::close() {
  if (!sync(descriptor_)) fail("must be synced to the disk");
  if (!descriptor_.close()) fail("must be closed");
}

GRADACCUM_INLINE void OutputFile::fail(const std::string& requirement) {
  const int error = errno;
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
GRADACCUM_INLINE ::pid_t process_in_name(const std::filesystem::path& path, std::string_view name) {
  const auto prefix = path.filename().string() + ".tmp-";
  ::pid_t process = 0;
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
    if (process == 0 || ::kill(process, 0) == 0 || errno != ESRCH) continue;
    const Descriptor file(entry->path(), O_RDWR | O_NOFOLLOW | O_NONBLOCK);  // fails for folders, links, pipes
    std::error_code kept;
    if (file.number() >= 0 && ::flock(file.number(), LOCK_EX | LOCK_NB) == 0)
      std::filesystem::remove(entry->path(), kept);
  }
}

GRADACCUM_INLINE void make_and_rename(const std::filesystem::path& temporary, const std::filesystem::path& path,
                                      const std::function<void()>& make, const char* requirement) {
  remove_temporaries_of_killed(path);
  try {
    const NoFileSizeSignal no_signal;
    make();
    if (std::rename(temporary.c_str(), path.c_str()) != 0) file_error(path, requirement, errno);
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
    : Descriptor(directory, O_RDONLY | O_DIRECTORY), owner_(::getpid()) {
  if (number() < 0) file_error(directory, "must be a directory that can be opened", errno);
  // Other errors mean a file system without locks; there the user has to ensure that there is one writer.
  if (::flock(number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw std::runtime_error(directory.string() + ": must have only one writer, but another process or thread is " +
                             "writing to it: wait for it, or choose another directory");
}

GRADACCUM_INLINE StateLock::~StateLock() {
  if (is_own()) ::flock(number(), LOCK_UN);
}

GRADACCUM_INLINE bool StateLock::is_own() const { return owner_ == ::getpid(); }

GRADACCUM_INLINE void check_is_writable(const std::filesystem::path& directory) {
  const auto probe = temporary_name(directory / StateName().text()), renamed = temporary_name(probe);
  const auto make = [&] {
    make_directory(directory);
    if (::mkdir(probe.c_str(), 0777) != 0) file_error(directory, "must be a directory that can be written to", errno);
    OutputFile file(probe / "probe");
    file.write("probe", 5);
    file.close();
  };
  make_and_rename(probe, renamed, make, "must be in a directory whose folders can be renamed");
  std::error_code error;
  std::filesystem::remove_all(renamed, error);
  if (error) file_error(directory, "must be a directory whose folders can be removed", error.value());
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
  if (::mkdir(folder_.c_str(), 0777) != 0) file_error(folder_, "must be a folder that can be created", errno);
}

GRADACCUM_INLINE UnfinishedState::~UnfinishedState() {
  std::error_code ignored;  // a later sweep removes the rest
  if (!folder_.empty() && lock_.is_own()) std::filesystem::remove_all(folder_, ignored);
}

GRADACCUM_INLINE std::filesystem::path UnfinishedState::finish() {
  sync_directory(folder_);
  if (std::rename(folder_.c_str(), path_.c_str()) != 0) file_error(path_, "must be given its name", errno);
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
  if (std::rename(older.c_str(), temporary_name(older).c_str()) != 0) file_error(older, "must be removed", errno);
  if (std::rename(newer.c_str(), older.c_str()) != 0) file_error(newer, "must be given its name", errno);
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
    if (std::rename(path.c_str(), temporary_name(path).c_str()) != 0) file_error(path, "must be removed", errno);
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
