// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replaces the operating system's file functions (open, write and so on) for the whole program, the standard library
// included, so that a test can make any call fail. Include it in one source of a program.

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace testing {

/// Counts and records all threads' calls on files while it lives, and makes the `at`-th, from 0, fail.
class FailingFiles {
 public:
  enum class How {
    fail,          ///< that call, with `error`
    fail_forever,  ///< and all after it, as when a disk dies
    interrupt,     ///< that call with EINTR, to be retried
    shorten,       ///< that write takes only half, if it is more than a byte
    write_none,    ///< that write returns 0
    kill,          ///< the process, just before the call
    hold,          ///< that call waits for `release`, then succeeds
  };

  /// Counts only calls on paths that contain `part`.
  explicit FailingFiles(long at = -1, How how = How::fail, int error = EIO, std::string part = "")
      : at_(at), how_(how), error_(error), part_(std::move(part)) {
    current = this;
  }
  FailingFiles(const FailingFiles&) = delete;
  FailingFiles& operator=(const FailingFiles&) = delete;
  ~FailingFiles() { current = outer_; }

  /// Continues a held call, and holds no others.
  void release() { released_.store(true), released_.notify_all(); }
  /// Releases when the caller has had time to begin waiting.
  void release_soon() {
    soon_ = std::jthread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      release();
    });
  }

  /// Calls such as "rename step-000040.tmp-1-2", with the last part of the path.
  const std::vector<std::string>& calls() const { return calls_; }
  bool has_failed() const { return at_ >= 0 && static_cast<long>(calls_.size()) > at_; }
  const std::string& failed() const { return calls_.at(static_cast<std::size_t>(at_)); }

  static bool lives() { return current.load() != nullptr; }
  /// Returns whether a call fails, and sets errno.
  static bool fails(const char* name, const std::string& path) {
    auto* const files = current.load();
    return files && files->count(name, path);
  }
  static bool fails(const char* name, int descriptor) {
    auto* const files = current.load();
    return files && files->count(name, path_of(descriptor));
  }
  /// Returns how many of `size` bytes a write that is already counted takes.
  static std::size_t taken(std::size_t size) {
    auto* const files = current.load();
    const bool is_short = files && files->how_ == How::shorten && files->is_it() && size > 1;
    return is_short ? size / 2 : size;
  }
  static bool takes_none() {
    auto* const files = current.load();
    return files && files->how_ == How::write_none && files->is_it();
  }

 private:
  bool is_it() const { return static_cast<long>(calls_.size()) - 1 == at_; }

  bool count(const std::string& name, const std::string& path) {
    if (path.find(part_) == path.npos) return false;
    std::unique_lock lock(mutex_);
    calls_.push_back(name + " " + path.substr(path.rfind('/') + 1));
    if (is_it() && how_ == How::kill) ::kill(::getpid(), SIGKILL);
    if (is_it() && how_ == How::hold) {
      lock.unlock();
      released_.wait(false);
      return false;
    }
    const bool is_after = at_ >= 0 && static_cast<long>(calls_.size()) - 1 > at_;
    const bool can_be_interrupted =
        name == "open" || name == "write" || name == "pread" || name == "fsync" || name == "close";
    if (how_ == How::interrupt && is_it() && can_be_interrupted) return errno = EINTR, true;
    if ((how_ == How::fail && is_it()) || (how_ == How::fail_forever && (is_it() || is_after)))
      return errno = error_, true;
    return false;
  }

  static std::string path_of(int descriptor) {
    std::array<char, 4096> path{};
    const auto link = "/proc/self/fd/" + std::to_string(descriptor);
    return ::readlink(link.c_str(), path.data(), path.size() - 1) < 0 ? "?" : path.data();
  }

  static inline std::atomic<FailingFiles*> current = nullptr;

  FailingFiles* outer_ = current;
  long at_;
  How how_;
  int error_;
  std::string part_;
  std::vector<std::string> calls_;
  std::mutex mutex_;
  std::atomic<bool> released_ = false;
  std::jthread soon_;
};

/// Returns the operating system's function.
template <class Function>
Function* real(Function* /*like*/, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace testing

extern "C" {

int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : mode_t{};
  va_end(arguments);
  static auto* const call = testing::real(&open, "open");
  return testing::FailingFiles::fails("open", path) ? -1 : call(path, flags, mode);
}

ssize_t write(int descriptor, const void* data, std::size_t size) {
  static auto* const call = testing::real(&write, "write");
  if (testing::FailingFiles::fails("write", descriptor)) return -1;
  if (testing::FailingFiles::takes_none()) return 0;
  return call(descriptor, data, testing::FailingFiles::taken(size));
}

ssize_t pread(int descriptor, void* data, std::size_t size, off_t offset) {
  static auto* const call = testing::real(&pread, "pread");
  return testing::FailingFiles::fails("pread", descriptor) ? -1 : call(descriptor, data, size, offset);
}

/// Skips the system's fsync while calls are counted, because a test without power failures need not wait for a disk.
int fsync(int descriptor) {
  static auto* const call = testing::real(&fsync, "fsync");
  if (testing::FailingFiles::fails("fsync", descriptor)) return -1;
  return testing::FailingFiles::lives() ? 0 : call(descriptor);
}

/// Closes even when it fails, as Linux does.
int close(int descriptor) {
  static auto* const call = testing::real(&close, "close");
  if (!testing::FailingFiles::fails("close", descriptor)) return call(descriptor);
  const int error = errno;
  call(descriptor);
  errno = error;
  return -1;
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const call = testing::real(&mkdir, "mkdir");
  return testing::FailingFiles::fails("mkdir", path) ? -1 : call(path, mode);
}

int flock(int descriptor, int operation) noexcept {
  static auto* const call = testing::real(&flock, "flock");
  return testing::FailingFiles::fails("flock", descriptor) ? -1 : call(descriptor, operation);
}

int rename(const char* from, const char* to) noexcept {
  static auto* const call = testing::real(&rename, "rename");
  return testing::FailingFiles::fails("rename", from) ? -1 : call(from, to);
}

int unlinkat(int directory, const char* path, int flags) noexcept {
  static auto* const call = testing::real(&unlinkat, "unlinkat");
  return testing::FailingFiles::fails("unlinkat", path) ? -1 : call(directory, path, flags);
}

}  // extern "C"
