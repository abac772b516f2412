// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/roll_call.hpp>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace gradaccum::detail {

/// Tells which processes are still there: each counts up in the store, several times a second, in a thread of its own.
///
/// Gloo says that a connection was closed, not whose process has ended; and it says so to the neighbours in a ring
/// alone. Who hears of it first looks whose count stands still, and leaves a word in the store for all others.
class Heartbeat {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds interval{250};
  static constexpr Milliseconds silence{2000};    ///< of a process that is gone, or hangs
  static constexpr Milliseconds patience{10000};  ///< for an answer of the store

  /// `store` is used by this thread alone from here on. `place` says where it is, for errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string place, int rank, int world_size)
      : shared_(std::make_shared<Shared>(RollCall(std::move(store), rank, world_size), std::move(place))) {
    thread_ = std::thread([shared = shared_] { shared->run(); });
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat() {
    const bool hangs = shared_->stop();
    if (hangs)
      thread_.detach();  // in a store that does not answer
    else
      thread_.join();
  }

  /// Waits until `done()`, or until it is known that it never will be. `wake` makes it look again.
  template <class Done>
  bool wait(const Done& done) {
    std::unique_lock lock(shared_->mutex);
    ++shared_->waits;
    shared_->changed.wait(lock, [&] { return done() || shared_->failure; });
    return done();
  }
  /// The same, for what nobody is woken by, for so long.
  template <class Done>
  bool poll(const Done& done, Milliseconds longest) {
    const auto end = std::chrono::steady_clock::now() + longest;
    std::unique_lock lock(shared_->mutex);
    ++shared_->waits;
    while (!done() && !shared_->failure && std::chrono::steady_clock::now() < end)
      shared_->changed.wait_for(lock, std::chrono::microseconds(50));
    return done();
  }
  /// For the thread in which `done()` becomes true.
  std::function<void()> wake() const {
    return [shared = shared_] {
      { const std::lock_guard lock(shared->mutex); }
      shared->changed.notify_all();
    };
  }

  /// What has gone wrong, in words: that of whoever knew first.
  std::string explain() { return shared_->explain(); }
  /// Tells all others.
  void announce(std::string failure) { shared_->announce(std::move(failure)); }

 private:
  struct Shared {
    Shared(RollCall roll_call, std::string place) : roll_call(std::move(roll_call)), place(std::move(place)) {}

    RollCall roll_call;
    std::string place;
    std::int64_t waits = 0, told = 0;  // how often this process has waited for others; and what they know of it

    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false, stopped = false, asked = false;
    std::optional<std::string> failure, to_announce;

    void run();
    void beat();
    void look_for_the_missing();
    void fail(std::string text);
    bool failed() {
      const std::lock_guard lock(mutex);
      return failure.has_value();
    }
    bool pause(Milliseconds time);
    bool stop();
    std::string explain();
    void announce(std::string text);
  };

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

inline void Heartbeat::Shared::run() {
  try {
    do beat();
    while (pause(interval));
    roll_call.leave(failed() ? silence : patience / 2);
  } catch (const std::exception&) {
    fail(place + " has ended");
  }
  const std::lock_guard lock(mutex);
  stopped = true;
  changed.notify_all();
}

inline void Heartbeat::Shared::beat() {
  roll_call.say_present();
  std::optional<std::string> ours;
  bool wanted = false;
  std::int64_t news = 0;
  {
    const std::lock_guard lock(mutex);
    ours = to_announce;
    wanted = asked && !failure;
    news = waits - std::exchange(told, waits);
  }
  roll_call.say_waited(news);
  if (const auto theirs = roll_call.failure()) return fail(*theirs);
  if (ours) {
    roll_call.say_failed(*ours);
    return fail(*ours);
  }
  if (wanted) look_for_the_missing();
}

/// Meanwhile this process goes on counting.
inline void Heartbeat::Shared::look_for_the_missing() {
  roll_call.note_counts();
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < silence) {
    roll_call.say_present();
    if (!pause(interval)) return;
  }
  auto who = roll_call.missing();
  if (!who) who = roll_call.behind();
  if (roll_call.failure()) return;  // somebody was faster; it is read at the next beat
  const auto text = who ? *who : "all processes are there, but the connection between two of them is lost";
  roll_call.say_failed(text);
  fail(text);
}

inline void Heartbeat::Shared::fail(std::string text) {
  const std::lock_guard lock(mutex);
  if (!failure) failure = std::move(text);
  changed.notify_all();
}

/// False when it is time to end.
inline bool Heartbeat::Shared::pause(Milliseconds time) {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, time, [this] { return stopping || (to_announce && !failure); });
  return !stopping;
}

/// True if the thread hangs.
inline bool Heartbeat::Shared::stop() {
  std::unique_lock lock(mutex);
  stopping = true;
  changed.notify_all();
  return !changed.wait_for(lock, patience, [this] { return stopped; });
}

inline std::string Heartbeat::Shared::explain() {
  std::unique_lock lock(mutex);
  asked = true;
  changed.wait_for(lock, patience, [this] { return failure || stopped; });
  return failure ? *failure : place + " has ended or hangs";
}

inline void Heartbeat::Shared::announce(std::string text) {
  std::unique_lock lock(mutex);
  if (failure) return;
  to_announce = std::move(text);
  changed.notify_all();
  changed.wait_for(lock, patience, [this] { return failure || stopped; });
}

}  // namespace gradaccum::detail
