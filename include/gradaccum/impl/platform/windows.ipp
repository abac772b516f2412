// SPDX-License-Identifier: Apache-2.0
// Windows, written from its documentation: compilers check this file, but it has never run.
#pragma once

#include <gradaccum/detail/platform/platform.hpp>

#ifdef _WIN32

#include <c10/util/win32-headers.h>

#include <fcntl.h>
#include <io.h>
#include <process.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::error_code last_error() { return {errno, std::generic_category()}; }

/// Sets errno to the error of the last function of Windows, and returns false.
GRADACCUM_INLINE bool note_error_of_windows() {
  const std::error_code error(static_cast<int>(::GetLastError()), std::system_category());
  const bool is_lock = ::GetLastError() == ERROR_LOCK_VIOLATION || ::GetLastError() == ERROR_SHARING_VIOLATION;
  errno = is_lock ? EWOULDBLOCK : error.default_error_condition().value();
  return false;
}

/// Windows sends no signals for writes.
GRADACCUM_INLINE NoWriteSignals::NoWriteSignals() { static_cast<void>(file_size_was_blocked_ || pipe_was_blocked_); }
GRADACCUM_INLINE NoWriteSignals::~NoWriteSignals() = default;

GRADACCUM_INLINE HANDLE handle_of(int number) { return reinterpret_cast<HANDLE>(::_get_osfhandle(number)); }

/// Opens a file that others may still rename or remove.
GRADACCUM_INLINE Descriptor::Descriptor(const std::filesystem::path& path, Open how) : number_(-1) {
  std::error_code ignored;
  const bool is_new = how == Open::new_file, is_directory = how == Open::directory;
  if ((how == Open::to_read_no_link || how == Open::to_lock) && std::filesystem::is_symlink(path, ignored)) {
    errno = ELOOP;
    return;
  }
  const DWORD access = is_directory           ? FILE_LIST_DIRECTORY
                       : is_new               ? GENERIC_WRITE
                       : how == Open::to_lock ? GENERIC_READ | GENERIC_WRITE
                                              : GENERIC_READ;
  const HANDLE handle = ::CreateFileW(path.c_str(), access, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                                      nullptr, is_new ? CREATE_NEW : OPEN_EXISTING,
                                      is_directory ? FILE_FLAG_BACKUP_SEMANTICS : FILE_ATTRIBUTE_NORMAL, nullptr);
  if (handle == INVALID_HANDLE_VALUE) {
    note_error_of_windows();
    return;
  }
  number_ = ::_open_osfhandle(reinterpret_cast<std::intptr_t>(handle), _O_BINARY);
  if (number_ < 0) ::CloseHandle(handle);
}

GRADACCUM_INLINE std::optional<Descriptor::Status> Descriptor::status() const {
  BY_HANDLE_FILE_INFORMATION file;
  if (number_ < 0) return std::nullopt;
  if (::GetFileType(handle_of(number_)) != FILE_TYPE_DISK) return Status{Status::other, 0};
  if (!::GetFileInformationByHandle(handle_of(number_), &file)) return note_error_of_windows(), std::nullopt;
  const bool is_directory = (file.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
  return Status{is_directory ? Status::directory : Status::regular,
                std::uint64_t{file.nFileSizeHigh} << 32 | file.nFileSizeLow};
}

GRADACCUM_INLINE unsigned bytes_at_once(std::size_t size) {
  return static_cast<unsigned>(std::min<std::size_t>(size, std::size_t{1} << 30));
}

GRADACCUM_INLINE std::size_t Descriptor::write(const void* data, std::size_t size) const {
  const int written = ::_write(number_, data, bytes_at_once(size));
  if (written == 0) errno = EIO;
  return written > 0 ? static_cast<std::size_t>(written) : 0;
}

GRADACCUM_INLINE std::optional<std::size_t> Descriptor::read_at(std::uint64_t offset, void* data,
                                                                std::size_t size) const {
  OVERLAPPED place{};
  place.Offset = static_cast<DWORD>(offset);
  place.OffsetHigh = static_cast<DWORD>(offset >> 32);
  DWORD read = 0;
  if (!::ReadFile(handle_of(number_), data, bytes_at_once(size), &read, &place) && ::GetLastError() != ERROR_HANDLE_EOF)
    return note_error_of_windows(), std::nullopt;
  return read;
}

GRADACCUM_INLINE bool Descriptor::bypass_cache(bool bypass) const { return !bypass; }  // only when a file is opened

GRADACCUM_INLINE bool Descriptor::cut(std::uint64_t bytes) const {
  const auto end = static_cast<std::int64_t>(bytes);
  return ::_chsize_s(number_, end) == 0 && ::_lseeki64(number_, end, SEEK_SET) == end;
}

/// NTFS logs the changes of directories itself.
GRADACCUM_INLINE bool Descriptor::sync() const {
  const auto now = status();
  return (now && now->kind == Status::directory) || ::_commit(number_) == 0;
}

/// A directory is locked by a handle that may delete it, and grants that to no other.
GRADACCUM_INLINE bool Descriptor::lock() const {
  const HANDLE handle = handle_of(number_);
  if (const auto now = status(); now && now->kind == Status::directory) {
    constexpr DWORD to_delete = 0x00010000;  // DELETE, which c10 undefines
    const HANDLE exclusive =
        ::ReOpenFile(handle, to_delete, FILE_SHARE_READ | FILE_SHARE_WRITE, FILE_FLAG_BACKUP_SEMANTICS);
    if (exclusive == INVALID_HANDLE_VALUE) return note_error_of_windows();
    lock_ = exclusive;
    return true;
  }
  OVERLAPPED from_begin{};
  return ::LockFileEx(handle, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, MAXDWORD, MAXDWORD,
                      &from_begin) != 0 ||
         note_error_of_windows();
}

GRADACCUM_INLINE void Descriptor::unlock() const {
  if (lock_) ::CloseHandle(std::exchange(lock_, nullptr));
}

GRADACCUM_INLINE bool Descriptor::close() noexcept {
  unlock();
  return number_ < 0 || ::_close(std::exchange(number_, -1)) == 0;
}

GRADACCUM_INLINE void* Descriptor::map(std::size_t bytes) const {
  const HANDLE mapping = ::CreateFileMappingW(handle_of(number_), nullptr, PAGE_WRITECOPY, 0, 0, nullptr);
  if (!mapping) return note_error_of_windows(), nullptr;
  void* const address = ::MapViewOfFile(mapping, FILE_MAP_COPY, 0, 0, bytes);
  if (!address) note_error_of_windows();
  ::CloseHandle(mapping);  // the view keeps it
  return address;
}

GRADACCUM_INLINE std::FILE* open_stream(const std::filesystem::path& path, const char* mode) {
  return ::_wfopen(path.c_str(), std::filesystem::path(mode).c_str());
}

GRADACCUM_INLINE bool cut(std::FILE* file, std::uint64_t bytes) {
  return ::_chsize_s(::_fileno(file), static_cast<std::int64_t>(bytes)) == 0;
}

GRADACCUM_INLINE bool is_terminal(std::FILE* file) { return ::_isatty(::_fileno(file)) != 0; }

GRADACCUM_INLINE std::size_t terminal_columns(std::FILE* file) {
  CONSOLE_SCREEN_BUFFER_INFO screen{};
  if (!::GetConsoleScreenBufferInfo(handle_of(::_fileno(file)), &screen)) return 0;
  return static_cast<std::size_t>(screen.srWindow.Right - screen.srWindow.Left + 1);
}

GRADACCUM_INLINE void* map_memory(std::size_t /*bytes*/) { return nullptr; }
GRADACCUM_INLINE void unmap(std::span<std::byte> mapped) { ::UnmapViewOfFile(mapped.data()); }

/// Pages that are not locked leave the working set.
GRADACCUM_INLINE void discard_pages(std::span<std::byte> range) { ::VirtualUnlock(range.data(), range.size()); }

GRADACCUM_INLINE std::optional<std::int64_t> limit_of_addresses() { return std::nullopt; }
GRADACCUM_INLINE bool keep_memory_of_malloc() { return false; }
GRADACCUM_INLINE int process_id() { return ::_getpid(); }

GRADACCUM_INLINE bool may_run(int process) {
  const HANDLE handle = ::OpenProcess(SYNCHRONIZE, FALSE, static_cast<DWORD>(process));
  if (!handle) return ::GetLastError() != ERROR_INVALID_PARAMETER;
  const bool runs = ::WaitForSingleObject(handle, 0) == WAIT_TIMEOUT;
  ::CloseHandle(handle);
  return runs;
}

GRADACCUM_INLINE void lower_priority_of_thread() {
  ::SetThreadPriority(::GetCurrentThread(), THREAD_PRIORITY_BELOW_NORMAL);
}

GRADACCUM_INLINE std::string machine_name() {
  const char* const name = std::getenv("COMPUTERNAME");
  return name ? name : "";
}

GRADACCUM_INLINE ArmFeatures arm_features() { return {}; }

GRADACCUM_INLINE std::vector<int> usual_stop_signals() { return {SIGINT, SIGTERM, SIGBREAK}; }

GRADACCUM_INLINE bool can_be_caught(int signal) {
  for (const int known : {SIGABRT, SIGBREAK, SIGFPE, SIGILL, SIGINT, SIGSEGV, SIGTERM})
    if (signal == known) return true;
  return false;
}

GRADACCUM_INLINE std::shared_ptr<void> load_library(const std::filesystem::path& path) {
  const HMODULE library = ::LoadLibraryW(path.c_str());
  if (!library)
    throw std::runtime_error(path.string() + ": must be a library that can be loaded, got " +
                             std::system_category().message(static_cast<int>(::GetLastError())));
  return {library, [](void* loaded) { ::FreeLibrary(static_cast<HMODULE>(loaded)); }};
}

/// Searches the program and OpenMP's library, because Windows does not have one table of all symbols.
GRADACCUM_INLINE void* find_symbol(void* library, const std::string& name) {
  const auto in = [&](HMODULE module) {
    return module ? reinterpret_cast<void*>(::GetProcAddress(module, name.c_str())) : nullptr;
  };
  if (library) return in(static_cast<HMODULE>(library));
  void* const own = in(::GetModuleHandleW(nullptr));
  return own ? own : in(::GetModuleHandleW(L"libiomp5md.dll"));
}

}  // namespace gradaccum::detail

#endif

#undef GRADACCUM_INLINE
