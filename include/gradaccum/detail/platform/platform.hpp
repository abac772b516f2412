// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

/// The library calls the operating system only by these functions. Only impl/platform/ includes the system's headers:
/// posix.ipp, which is tested on Linux, and windows.ipp, which is compiled but was never run.

namespace gradaccum::detail {

/// Returns the error of the last function here that failed, or of one of C's.
std::error_code last_error();

/// A scope in which a write that must fail returns an error. Otherwise, beyond the limit of file sizes (`ulimit -f`) or
/// into a closed pipe or socket, a signal would end the program. Threads that are started in the scope never receive
/// these signals.
class NoWriteSignals {
 public:
  NoWriteSignals();
  NoWriteSignals& operator=(NoWriteSignals&&) = delete;
  ~NoWriteSignals();

 private:
  bool file_size_was_blocked_ = false, pipe_was_blocked_ = false;
};

/// An open file or directory, closed by the destructor. Functions that return false, 0 or nullopt have failed: see
/// last_error().
class Descriptor {
 public:
  enum class Open {
    to_read,          ///< never waits for the writer of a pipe
    to_read_no_link,  ///< the same, but fails for a symbolic link
    to_lock,          ///< a file that exists; fails for a symbolic link
    new_file,         ///< fails if the name exists
    directory,        ///< to be synced or locked
  };
  struct Status {
    enum Kind { regular, directory, other } kind;
    std::uint64_t bytes;
  };

  Descriptor(const std::filesystem::path& path, Open how);
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() { close(); }

  explicit operator bool() const { return number_ >= 0; }
  std::optional<Status> status() const;

  /// Writes some of the bytes, and returns how many.
  std::size_t write(const void* data, std::size_t size) const;
  /// Reads some of the bytes from `offset` on, and returns how many, 0 at the end of the file. Thread-safe.
  std::optional<std::size_t> read_at(std::uint64_t offset, void* data, std::size_t size) const;
  /// Sets whether writes bypass the system's cache. Their data must then begin at a multiple of 4096 in memory.
  bool bypass_cache(bool bypass) const;
  /// Cuts the file off after `bytes`, where the next write continues.
  bool cut(std::uint64_t bytes) const;
  /// Writes the file's data to the disk, so that they survive a power failure.
  bool sync() const;

  /// Locks the file for this descriptor. Another one's lock is std::errc::operation_would_block.
  bool lock() const;
  void unlock() const;

  /// Must not be retried: the descriptor is closed even if there is an error.
  bool close() noexcept;

  /// Returns a private mapping of the first `bytes`, or null: pages are read from the disk on first access, and writes
  /// never reach the file.
  void* map(std::size_t bytes) const;

 private:
  int number_;
#ifdef _WIN32
  mutable void* lock_ = nullptr;
#endif
};

/// Opens a file as std::fopen does, with a name that may have any characters.
std::FILE* open_stream(const std::filesystem::path& path, const char* mode);
bool cut(std::FILE* file, std::uint64_t bytes);
bool is_terminal(std::FILE* file);
/// Returns the width of a terminal in characters; 0 if it is unknown.
std::size_t terminal_columns(std::FILE* file);

/// Returns new memory, whose pages are allocated on first access, or null; always null on other systems than Linux.
void* map_memory(std::size_t bytes);
/// Releases what map_memory or Descriptor::map has returned.
void unmap(std::span<std::byte> mapped);
/// Frees the whole pages in a range. The next access to a mapped file reads it from the disk again; other memory then
/// has unspecified values.
void discard_pages(std::span<std::byte> range);
/// Returns the bytes that `ulimit -v` permits; nullopt if there is no limit.
std::optional<std::int64_t> limit_of_addresses();
/// Makes malloc keep freed memory. Returns false if that cannot be asked of it.
bool keep_memory_of_malloc();

int process_id();
/// Returns false if it is certain that this machine runs no such process.
bool may_run(int process);
/// Gives other threads precedence over this one, if the system has a priority for each thread.
void lower_priority_of_thread();
/// Returns the name of this machine; "" if it has none.
std::string machine_name();

/// The instructions that only some processors of Arm have; all false on other processors.
struct ArmFeatures {
  bool crc32 = false;  ///< instructions for CRC-32
  bool bf16 = false;   ///< products of matrices in bfloat16
};
ArmFeatures arm_features();

/// The signals by which users and schedulers end a program.
std::vector<int> usual_stop_signals();
/// Returns whether a program can handle the signal.
bool can_be_caught(int signal);

/// Loads a shared library, which is unloaded with the last copy of the result. Throws std::runtime_error with the path.
std::shared_ptr<void> load_library(const std::filesystem::path& path);
/// Returns the address of a symbol of a library, or of the whole program if `library` is null; null if it is not there.
void* find_symbol(void* library, const std::string& name);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/platform/posix.ipp>
#include <gradaccum/impl/platform/windows.ipp>
#endif
