// SPDX-License-Identifier: Apache-2.0
// Linux and other systems with POSIX. What only Linux has is left out elsewhere.
#pragma once

#include <gradaccum/detail/platform/platform.hpp>

#ifndef _WIN32

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <malloc.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#endif

#include <array>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Calls a function of the system until no signal interrupts it.
auto uninterrupted(const auto& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

GRADACCUM_INLINE std::error_code last_error() { return {errno, std::generic_category()}; }

GRADACCUM_INLINE sigset_t write_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGXFSZ);
  ::sigaddset(&signals, SIGPIPE);
  return signals;
}

GRADACCUM_INLINE NoWriteSignals::NoWriteSignals() {
  const auto signals = write_signals();
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &signals, &before);
  file_size_was_blocked_ = ::sigismember(&before, SIGXFSZ) == 1;
  pipe_was_blocked_ = ::sigismember(&before, SIGPIPE) == 1;
}

/// Consumes pending signals: the system sends them to the thread that writes, where they wait while they are blocked.
GRADACCUM_INLINE NoWriteSignals::~NoWriteSignals() {
  const int error = errno;
  auto signals = write_signals();
  if (file_size_was_blocked_) ::sigdelset(&signals, SIGXFSZ);
  if (pipe_was_blocked_) ::sigdelset(&signals, SIGPIPE);
#ifdef __linux__  // macOS cannot consume a signal without the risk of waiting for it
  const ::timespec now{};
  while (::sigtimedwait(&signals, nullptr, &now) > 0) {
  }
#endif
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  errno = error;
}

GRADACCUM_INLINE int flags_to_open(Descriptor::Open how) {
  switch (how) {
    case Descriptor::Open::to_read:
      return O_RDONLY | O_NONBLOCK;
    case Descriptor::Open::to_read_no_link:
      return O_RDONLY | O_NONBLOCK | O_NOFOLLOW;
    case Descriptor::Open::to_lock:
      return O_RDWR | O_NONBLOCK | O_NOFOLLOW;
    case Descriptor::Open::new_file:
      return O_WRONLY | O_CREAT | O_EXCL;
    case Descriptor::Open::directory:
      return O_RDONLY | O_DIRECTORY;
  }
  return O_RDONLY;
}

GRADACCUM_INLINE Descriptor::Descriptor(const std::filesystem::path& path, Open how)
    : number_(uninterrupted([&] { return ::open(path.c_str(), flags_to_open(how) | O_CLOEXEC, 0666); })) {}

GRADACCUM_INLINE std::optional<Descriptor::Status> Descriptor::status() const {
  struct ::stat status {};
  if (number_ < 0 || ::fstat(number_, &status) != 0) return std::nullopt;
  return Status{S_ISREG(status.st_mode)   ? Status::regular
                : S_ISDIR(status.st_mode) ? Status::directory
                                          : Status::other,
                static_cast<std::uint64_t>(status.st_size)};
}

GRADACCUM_INLINE std::size_t Descriptor::write(const void* data, std::size_t size) const {
  const NoWriteSignals no_signals;
  const auto written = uninterrupted([&] { return ::write(number_, data, size); });
  if (written == 0) errno = EIO;  // should never happen; a retry might loop forever
  return written > 0 ? static_cast<std::size_t>(written) : 0;
}

GRADACCUM_INLINE std::optional<std::size_t> Descriptor::read_at(std::uint64_t offset, void* data,
                                                                std::size_t size) const {
  const auto read = uninterrupted([&] { return ::pread(number_, data, size, static_cast<off_t>(offset)); });
  return read < 0 ? std::nullopt : std::optional(static_cast<std::size_t>(read));
}

GRADACCUM_INLINE bool Descriptor::bypass_cache(bool bypass) const {
#ifdef O_DIRECT
  return ::fcntl(number_, F_SETFL, bypass ? O_DIRECT : 0) == 0;  // not every file system has it
#else
  return !bypass;
#endif
}

GRADACCUM_INLINE bool Descriptor::cut(std::uint64_t bytes) const {
  const auto end = static_cast<off_t>(bytes);
  return ::ftruncate(number_, end) == 0 && ::lseek(number_, end, SEEK_SET) == end;
}

GRADACCUM_INLINE bool Descriptor::sync() const {
#ifdef F_FULLFSYNC
  if (::fcntl(number_, F_FULLFSYNC) == 0) return true;  // fsync of macOS leaves data in the disk's own cache
#endif
  return uninterrupted([&] { return ::fsync(number_); }) == 0;
}

GRADACCUM_INLINE bool Descriptor::lock() const { return ::flock(number_, LOCK_EX | LOCK_NB) == 0; }
GRADACCUM_INLINE void Descriptor::unlock() const { ::flock(number_, LOCK_UN); }

GRADACCUM_INLINE bool Descriptor::close() noexcept {
  return number_ < 0 || ::close(std::exchange(number_, -1)) == 0 || errno == EINTR;
}

GRADACCUM_INLINE void* Descriptor::map(std::size_t bytes) const {
  int flags = MAP_PRIVATE;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;  // otherwise Linux reserves memory for a copy, and refuses files larger than the memory
#endif
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, number_, 0);
  return address == MAP_FAILED ? nullptr : address;
}

GRADACCUM_INLINE std::FILE* open_stream(const std::filesystem::path& path, const char* mode) {
  return std::fopen(path.c_str(), mode);
}

GRADACCUM_INLINE bool cut(std::FILE* file, std::uint64_t bytes) {
  return ::ftruncate(::fileno(file), static_cast<off_t>(bytes)) == 0;
}

GRADACCUM_INLINE bool is_terminal(std::FILE* file) { return ::isatty(::fileno(file)) == 1; }

GRADACCUM_INLINE std::size_t terminal_columns(std::FILE* file) {
  ::winsize size{};
  return ::ioctl(::fileno(file), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

GRADACCUM_INLINE void* map_memory([[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  void* const address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address != MAP_FAILED) return address;
#endif
  return nullptr;
}

GRADACCUM_INLINE void unmap(std::span<std::byte> mapped) { ::munmap(mapped.data(), mapped.size()); }

GRADACCUM_INLINE void discard_pages(std::span<std::byte> range) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(range.data()), end = begin + range.size();
  const auto first = (begin + page - 1) / page * page, last = end / page * page;
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

GRADACCUM_INLINE std::optional<std::int64_t> limit_of_addresses() {
  ::rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return static_cast<std::int64_t>(limit.rlim_cur);
}

GRADACCUM_INLINE bool keep_memory_of_malloc() {
#ifdef __GLIBC__
  constexpr int gigabyte = 1 << 30, most_of_old_versions = 32 << 20, pad = 64 << 20;
  const bool maps_less =
      ::mallopt(M_MMAP_THRESHOLD, gigabyte) == 1 || ::mallopt(M_MMAP_THRESHOLD, most_of_old_versions) == 1;
  return maps_less && ::mallopt(M_TRIM_THRESHOLD, gigabyte) == 1 && ::mallopt(M_TOP_PAD, pad) == 1;
#else
  return false;
#endif
}

GRADACCUM_INLINE int process_id() { return ::getpid(); }

GRADACCUM_INLINE bool may_run(int process) { return ::kill(process, 0) == 0 || errno != ESRCH; }

GRADACCUM_INLINE void lower_priority_of_thread() {
#ifdef __linux__
  ::setpriority(PRIO_PROCESS, static_cast<::id_t>(::syscall(SYS_gettid)), 10);  // Linux has one priority per thread
#endif
}

GRADACCUM_INLINE std::string machine_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

GRADACCUM_INLINE ArmFeatures arm_features() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long crc32 = 1UL << 7, bf16 = 1UL << 14;  // HWCAP_CRC32, HWCAP2_BF16
  return {(::getauxval(AT_HWCAP) & crc32) != 0, (::getauxval(AT_HWCAP2) & bf16) != 0};
#elif defined(__aarch64__)
  return {.crc32 = true};
#else
  return {};
#endif
}

GRADACCUM_INLINE std::vector<int> usual_stop_signals() { return {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}; }

GRADACCUM_INLINE bool can_be_caught(int signal) {
  return signal > 0 && signal < NSIG && signal != SIGKILL && signal != SIGSTOP;
}

GRADACCUM_INLINE std::shared_ptr<void> load_library(const std::filesystem::path& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(path.string() + ": must be a library that can be loaded, got " + ::dlerror());
  return {library, [](void* loaded) { ::dlclose(loaded); }};
}

GRADACCUM_INLINE void* find_symbol(void* library, const std::string& name) {
  return ::dlsym(library ? library : RTLD_DEFAULT, name.c_str());
}

}  // namespace gradaccum::detail

#endif

#undef GRADACCUM_INLINE
