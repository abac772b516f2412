// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/memory_meter.hpp>
#include <gradaccum/profile_report.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
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

/// The memory by kind at the end of each phase. Counts what a `MemoryMeter` counts from construction on, and older
/// memory of the known kinds until it is freed.
class MemoryByPhase {
 public:
  using SeeHeld = c10::function_ref<void(std::int64_t MemoryByKind::*kind, const at::Tensor& tensor)>;

  /// `for_each_held` enumerates the tensors of all known kinds, as TrainerBase does.
  explicit MemoryByPhase(std::function<void(SeeHeld)> for_each_held);

  /// Ends a phase, and keeps its memory if it is the largest so far for that name. Memory that "forward" has added
  /// counts as activations at its end, and as rest from the next phase on.
  void end(const std::string& phase);

  const std::vector<ProfiledMemory>& phases() const { return phases_; }
  std::int64_t peak_bytes() const { return older_bytes() + meter_.peak_bytes(); }

 private:
  MemoryByKind now() const;
  std::int64_t older_bytes() const;

  std::function<void(SeeHeld)> for_each_held_;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::int64_t>> older_;
  std::vector<ProfiledMemory> phases_;
  std::int64_t rest_before_ = 0;
  MemoryMeter meter_;
};

/// The time since construction, by phase. Each moment counts for the innermost open phase, or for "other" without one.
class PhaseTimes {
 public:
  void enter(const std::string& name);
  void leave();
  bool in_phase() const { return !open_.empty(); }

  /// Returns the times up to now. Shares are fractions of the total time.
  std::vector<ProfiledPhase> phases();

 private:
  using Clock = std::chrono::steady_clock;
  struct Phase {
    std::string name;
    std::int64_t times = 0;
    Clock::duration time = {};
  };

  void count();
  std::size_t place_of(const std::string& name);

  std::vector<Phase> phases_;
  std::vector<std::size_t> open_;  // indices of phases, the innermost last
  Phase other_{"other"};
  Clock::time_point counted_ = Clock::now();
};

}  // namespace gradaccum::detail

namespace at {
struct RecordFunction;
}

namespace gradaccum::detail {

/// A name that a trace shows for the lifetime of this object, if a profiler runs.
class TraceMark {
 public:
  explicit TraceMark(const std::string& name);
  TraceMark(const TraceMark&) = delete;
  TraceMark& operator=(const TraceMark&) = delete;
  ~TraceMark();

 private:
  std::unique_ptr<at::RecordFunction> record_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/kineto_session.ipp>
#endif
