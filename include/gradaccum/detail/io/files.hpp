// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/platform/platform.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

/// Files and directories. Every error is a `std::runtime_error` that names the path.

namespace gradaccum::detail {

/// Throws `path: requirement, got No space left on device: free some room`.
[[noreturn]] void file_error(const std::filesystem::path& path, const std::string& requirement,
                             const std::error_code& error);

/// Makes the entries of a directory survive a power failure.
void sync_directory(const std::filesystem::path& path);

/// Creates a directory and its missing parents, so that they survive a power failure.
void make_directory(const std::filesystem::path& path);

/// Throws if states cannot be written to a directory, which is created if needed: creates a folder with a file there,
/// renames it, and removes it. Checking permissions would not suffice: file systems may be read-only, full, or unable
/// to rename.
void check_is_writable(const std::filesystem::path& directory);

/// The characters of names that are plain on every file system, and need no quotes in any shell.
inline constexpr std::string_view plain_characters =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";

/// Returns the names in a directory, unordered; empty if it does not exist.
std::vector<std::string> names_in(const std::filesystem::path& path);

/// Returns `path` + ".tmp-<process>-<random>", a unique name next to it.
std::filesystem::path temporary_name(std::filesystem::path path);

/// A regular file, open for reading. Rejects symbolic links, and pipes, since opening one could block forever.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);

  /// Returns the file's size when it was opened.
  std::uint64_t bytes() const { return bytes_; }

  /// Reads from `offset` on. Returns the number of bytes, below `size` only at the end of the file. Thread-safe.
  std::size_t read_at(std::uint64_t offset, void* data, std::size_t size) const;

 private:
  std::filesystem::path path_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
};

/// A private mapping of a file: pages are read from the disk on first access, and writes never reach the file. The file
/// may be replaced or removed; if another process truncates it, accessing the lost pages kills this one.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  std::span<std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  std::span<std::byte> bytes_;
};

/// A new file, written sequentially, with its CRC-32. It is complete, and survives a power failure, once `close` has
/// returned and its directory is synced. An error is final, as the operating system reports lost data only once.
class OutputFile {
 public:
  /// `passed_by` bypasses the system's cache, which halves the processor time. It needs data that begins at a multiple
  /// of `block` in memory, and otherwise uses the cache.
  enum class Cache { used, passed_by };
  static constexpr std::size_t block = 4096;

  explicit OutputFile(std::filesystem::path path, Cache cache = Cache::used);

  /// Locks the file until it is closed, so that other processes can detect that it is being written.
  void lock() const;
  void write(const void* data, std::size_t size);
  void close();

  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t crc32() const { return crc32_; }

 private:
  [[noreturn]] void fail(const std::string& requirement);
  void use_cache();

  std::filesystem::path path_;
  bool direct_;
  Descriptor descriptor_;
  std::uint64_t bytes_ = 0;
  std::uint32_t crc32_ = 0;
};

/// Runs `make`, which creates the file or folder `temporary`, and renames it to `path`. Removes it after an error, and
/// also files that killed processes have left under temporary names of `path`.
void make_and_rename(const std::filesystem::path& temporary, const std::filesystem::path& path,
                     const std::function<void()>& make, const char* requirement = "must be replaced (is as before)");

/// Replaces or creates the file `path`: runs `write` on a temporary file in the same folder, and renames it. If the
/// process is killed, `path` is either the old file or the new one.
void replace_file(const std::filesystem::path& path, const std::function<void(OutputFile&)>& write);

/// The name of a state: `step-000040`, or `step-000040.1`, `.2` and so on if that is taken. Ordered by time.
struct StateName {
  std::int64_t step = 0, repeat = 0;

  auto operator<=>(const StateName&) const = default;

  std::string text() const;

  /// Parses a name; nullopt unless `text()` gives exactly `text`, so that no two names mean the same state.
  static std::optional<StateName> of(std::string_view text);
};

/// Locks a directory of states for one writer, until destruction or the end of the process. A child of `fork` shares
/// the lock: it cannot unlock it, and does not keep it after this process has.
class StateLock : Descriptor {
 public:
  explicit StateLock(const std::filesystem::path& directory);
  ~StateLock();

  /// Returns false in a child of the process that locked it.
  bool is_own() const;

 private:
  int owner_;
};

/// A state that is being written, under a temporary name, in a directory that is locked for it. The destructor removes
/// it, unless `finish` has given it its name, or the process is a child of the writing one.
class UnfinishedState {
 public:
  UnfinishedState(const std::filesystem::path& directory, std::int64_t step);
  UnfinishedState& operator=(UnfinishedState&&) = delete;
  ~UnfinishedState();

  const std::filesystem::path& folder() const { return folder_; }

  /// Syncs the folder, whose files must be synced, gives it its final name and syncs that. Returns the state's path.
  std::filesystem::path finish();

 private:
  StateLock lock_;
  std::filesystem::path path_, folder_;
};

/// A directory of states. Each is a folder that appears atomically and never changes, even if the process is killed or
/// the power fails: every state that `finished` lists is complete. One writer at a time. Never changes other names.
class StateDirectory {
 public:
  struct State : StateName {
    std::filesystem::path path;
  };

  explicit StateDirectory(std::filesystem::path path) : path_(std::move(path)) {}

  /// Returns the complete states, oldest first.
  std::vector<State> finished() const;

  /// Begins to write a state, whose files the caller creates and syncs.
  std::unique_ptr<UnfinishedState> begin(std::int64_t step) const;

  /// Replaces `older` by `newer` under the older one's name if both are states of one step. Returns the newer one's
  /// path.
  std::filesystem::path replace(const std::filesystem::path& older, const std::filesystem::path& newer);

  /// Removes all states except the `count` newest and `others`.
  void keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others = {});

  /// Removes folders that a killed process left half written or half removed. Other functions that write do so, too.
  void sweep() const;

 private:
  std::filesystem::path path_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/files.ipp>
#endif
