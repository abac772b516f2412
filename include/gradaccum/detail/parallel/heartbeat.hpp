// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

namespace c10d {
class Store;
}

namespace gradaccum::detail {

/// The maximum number of ranks of a group. Each rank keeps some kilobytes per other rank.
inline constexpr int most_ranks = 65536;
/// The time that a process waits for others to start before it warns.
inline constexpr std::chrono::milliseconds longest_silence{10000};

/// Detects processes that have ended. A thread of each increments a counter in the store several times a second.
///
/// Gloo reports a closed connection only to the neighbours in a ring, and not which process has ended. The first
/// process that receives the report finds the stopped counter, and writes the failure to the store for all. Gloo does
/// not report a lost link or a suspended process: so once per second rank 0 checks the counters of all others, and they
/// check rank 0's. A waiting process also checks that the store answers its thread, which may hang.
class Heartbeat {
 public:
  /// The time without a beat after which a process counts as dead, long enough for a process on a busy machine.
  static constexpr std::chrono::milliseconds dead_after{30000};

  /// Starts the thread, which must be the only user of `store`. `store_name` locates the store in errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string store_name, int rank, int world_size,
            std::chrono::milliseconds timeout = dead_after);
  Heartbeat& operator=(Heartbeat&&) = delete;
  ~Heartbeat();

  /// Waits until `done()` is true or a failure is known. Returns the last result of `done()`. `wake` triggers a check.
  bool wait(const std::function<bool()>& done);
  /// Like wait(), but polls, and gives up after `longest`.
  bool poll(const std::function<bool()>& done, std::chrono::milliseconds longest);
  /// Returns a function that the thread which makes `done()` true must call.
  std::function<void()> wake() const;

  /// Returns true if a failure is known.
  bool failed() const;
  /// Returns the description of the failure by the process that found it first.
  std::string explain();
  /// Reports a failure to all other processes.
  void announce(std::string failure);

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

/// Detects a counter that has stopped for too long. Each call adds at most a second, so that time in which the
/// observing process itself was suspended, or had no processor, does not count.
class StallDetector {
 public:
  explicit StallDetector(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  bool stalled(std::int64_t count) {
    const auto now = Clock::now();
    const auto step = std::min<Clock::duration>(now - std::exchange(last_call_, now), std::chrono::seconds(1));
    stalled_for_ = count == std::exchange(count_, count) ? stalled_for_ + step : Clock::duration::zero();
    return stalled_for_ >= timeout_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::duration timeout_, stalled_for_ = Clock::duration::zero();
  Clock::time_point last_call_ = Clock::now();
  std::int64_t count_ = -1;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/heartbeat.ipp>
#endif
