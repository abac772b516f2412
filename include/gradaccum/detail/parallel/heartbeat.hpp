// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace c10d {
class Store;
}

namespace gradaccum::detail {

/// Detects processes that have ended. A thread of each increments a counter in the store several times a second.
///
/// Gloo reports a closed connection, but not which process has ended, and reports it only to the neighbours in a ring.
/// The first process to notice finds the counter that has stopped, and writes the failure to the store for all others.
///
/// Gloo does not report a lost link or a suspended process. So once a second rank 0 checks the counters of all others,
/// and they check its counter. A waiting process also checks that the store answers its thread, which may hang.
class Heartbeat {
 public:
  /// The silence after which a process counts as dead. One on a machine that is merely busy still counts in time.
  static constexpr std::chrono::milliseconds longest_silence{30000};

  /// Starts the thread, which must be the only user of `store`. `place` locates the store in errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string place, int rank, int world_size,
            std::chrono::milliseconds silence = longest_silence);
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat();

  /// Waits until `done()` is true or a failure is known, and returns the former. `wake` triggers a check.
  bool wait(const std::function<bool()>& done);
  /// Like wait(), but polls, and gives up after `longest`.
  bool poll(const std::function<bool()>& done, std::chrono::milliseconds longest);
  /// Returns a function for the thread in which `done()` becomes true.
  std::function<void()> wake() const;

  /// Returns the description of the failure by the process that found it first.
  std::string explain();
  /// Reports a failure to all other processes.
  void announce(std::string failure);

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/heartbeat.ipp>
#endif
