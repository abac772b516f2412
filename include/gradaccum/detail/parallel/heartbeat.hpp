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

/// Tells which processes are still there: each counts up in the store, several times a second, in a thread of its own.
///
/// Gloo says that a connection was closed, not whose process has ended; and it says so to the neighbours in a ring
/// alone. Who hears of it first looks whose count stands still, and leaves a word in the store for all others.
///
/// Of a link that is lost, or a process that is suspended, Gloo says nothing. So rank 0 watches the counts of all
/// others, once a second, and they watch its; and who waits sees whether the store still answers its own thread, which
/// may hang in a call of the system.
class Heartbeat {
 public:
  /// After so long without a sign a process counts as gone. A machine that is merely busy lets it count in time.
  static constexpr std::chrono::milliseconds longest_silence{30000};

  /// `store` is used by its thread alone from here on. `place` says where it is, for errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string place, int rank, int world_size,
            std::chrono::milliseconds silence = longest_silence);
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat();

  /// Waits until `done()`, or until it is known that it never will be. `wake` makes it look again.
  bool wait(const std::function<bool()>& done);
  /// The same, for what nobody is woken by, for so long.
  bool poll(const std::function<bool()>& done, std::chrono::milliseconds longest);
  /// For the thread in which `done()` becomes true.
  std::function<void()> wake() const;

  /// What has gone wrong, in words: that of whoever knew first.
  std::string explain();
  /// Tells all others.
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
