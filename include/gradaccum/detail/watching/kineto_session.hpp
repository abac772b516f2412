// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

namespace gradaccum::detail {

/// An event that LibTorch's profiler recorded.
struct ProfiledEvent {
  enum class Kind { operation, kernel, memory };

  Kind kind = Kind::operation;
  std::string name = {};
  std::int64_t begin = 0, end = 0;  ///< nanoseconds
  std::uint64_t thread = 0;
  std::uint64_t correlation = 0;  ///< equal for an operation and the kernels that it launched
  std::int64_t bytes = 0;         ///< allocated, or freed if negative

  std::int64_t duration() const { return end - begin; }
};

/// Throws if LibTorch's profiler cannot start on this thread. The error names `who`.
void check_can_profile(const char* who);

/// A run of LibTorch's profiler on this thread and those of its backward passes. Only kineto_session.ipp knows Kineto.
class KinetoSession {
 public:
  explicit KinetoSession(const char* who);
  KinetoSession(const KinetoSession&) = delete;
  KinetoSession& operator=(const KinetoSession&) = delete;
  ~KinetoSession();  ///< ends the run without a trace

  bool running() const { return running_; }
  /// Ends the run on the thread that began it, and returns its events. Waits for the device. Writes a trace for
  /// Perfetto and chrome://tracing unless `trace` is empty.
  std::vector<ProfiledEvent> end(const std::filesystem::path& trace);

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  bool running_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/kineto_session.ipp>
#endif
