// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

namespace gradaccum::detail {

/// Something that happened while LibTorch's profiler was at work.
struct ProfiledEvent {
  enum class Kind { operation, kernel, memory };

  Kind kind = Kind::operation;
  std::string name = {};
  std::int64_t begin = 0, end = 0;  ///< nanoseconds
  std::uint64_t thread = 0;
  std::uint64_t correlation = 0;  ///< of an operation, and of kernels that it started
  std::int64_t bytes = 0;         ///< allocated; freed, where negative

  std::int64_t duration() const { return end - begin; }
};

/// Throws, in the name of `who`, where LibTorch's profiler cannot start on this thread.
void check_can_profile(const char* who);

/// LibTorch's own profiler, Kineto, at work on this thread and on those of its backward passes. All that is known of
/// its interface is in this file's definitions.
class KinetoSession {
 public:
  explicit KinetoSession(const char* who);
  KinetoSession(const KinetoSession&) = delete;
  KinetoSession& operator=(const KinetoSession&) = delete;
  ~KinetoSession();  ///< ends it, without a trace

  bool running() const { return running_; }
  /// On the thread that has begun it. A trace is written, for Perfetto and chrome://tracing, where `trace` is not
  /// empty.
  std::vector<ProfiledEvent> end(const std::filesystem::path& trace);

 private:
  std::thread::id thread_ = std::this_thread::get_id();
  bool running_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/kineto_session.ipp>
#endif
