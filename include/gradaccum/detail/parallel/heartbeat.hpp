// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
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
#include <vector>

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
      : shared_(std::make_shared<Shared>()) {
    shared_->store = std::move(store);
    shared_->place = std::move(place);
    shared_->rank = rank;
    shared_->counts.resize(static_cast<std::size_t>(world_size));
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
    c10::intrusive_ptr<c10d::Store> store;
    std::string place;
    int rank = 0;
    std::vector<std::int64_t> counts;
    std::int64_t waits = 0, told = 0;  // how often this process has waited for others; and what they know of it

    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false, stopped = false, asked = false;
    std::optional<std::string> failure, to_announce;

    void run();
    void beat();
    void look_for_the_missing();
    std::optional<std::string> missing();
    std::optional<std::string> behind();
    void leave();
    void fail(std::string text);
    bool pause(Milliseconds time);
    bool stop();
    std::string explain();
    void announce(std::string text);
    std::string key_of(std::size_t of) const { return "heartbeat/" + std::to_string(of); }
  };

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

inline void Heartbeat::Shared::run() {
  try {
    do beat();
    while (pause(interval));
    leave();
  } catch (const std::exception&) {
    fail(place + " has ended");
  }
  const std::lock_guard lock(mutex);
  stopped = true;
  changed.notify_all();
}

inline void Heartbeat::Shared::beat() {
  store->add(key_of(static_cast<std::size_t>(rank)), 1);
  std::optional<std::string> ours;
  bool wanted = false;
  std::int64_t news = 0;
  {
    const std::lock_guard lock(mutex);
    ours = to_announce;
    wanted = asked && !failure;
    news = waits - std::exchange(told, waits);
  }
  if (news > 0) store->add("waits/" + std::to_string(rank), news);
  if (store->check({"failure"})) {
    const auto text = store->get("failure");
    return fail(std::string(text.begin(), text.end()));
  }
  if (ours) {
    store->set("failure", std::vector<std::uint8_t>(ours->begin(), ours->end()));
    return fail(*ours);
  }
  if (wanted) look_for_the_missing();
}

/// Meanwhile this process goes on counting.
inline void Heartbeat::Shared::look_for_the_missing() {
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = store->add(key_of(i), 0);
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < silence) {
    store->add(key_of(static_cast<std::size_t>(rank)), 1);
    if (!pause(interval)) return;
  }
  auto who = missing();
  if (!who) who = behind();
  if (store->check({"failure"})) return;  // somebody was faster; it is read at the next beat
  const auto text = who ? *who : "all processes are there, but the connection between two of them is lost";
  store->set("failure", std::vector<std::uint8_t>(text.begin(), text.end()));
  fail(text);
}

/// `rank 1 has ended or hangs`
inline std::optional<std::string> Heartbeat::Shared::missing() {
  std::string ranks;
  int number = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (store->add(key_of(i), 0) != counts[i]) continue;
    ranks += (number++ > 0 ? ", " : "") + std::to_string(i);
  }
  if (number == 0) return {};
  return number == 1 ? "rank " + ranks + " has ended or hangs" : "ranks " + ranks + " have ended or hang";
}

/// Rank 0's process has the store, and so ends last; but for what is gone, or has yet to hear of that.
inline void Heartbeat::Shared::leave() {
  const auto everybody = static_cast<std::int64_t>(counts.size());
  const auto longest = [&] {
    const std::lock_guard lock(mutex);
    return failure ? silence : patience / 2;
  }();
  const auto begin = std::chrono::steady_clock::now();
  auto left = store->add("left", 1);
  while (rank == 0 && left < everybody && std::chrono::steady_clock::now() - begin < longest) {
    std::this_thread::sleep_for(interval / 10);
    left = store->add("left", 0);
  }
}

/// All are there, but some have not come to where the others wait.
inline std::optional<std::string> Heartbeat::Shared::behind() {
  std::vector<std::int64_t> waited;
  for (std::size_t i = 0; i < counts.size(); ++i) waited.push_back(store->add("waits/" + std::to_string(i), 0));
  const auto [least, most] = std::minmax_element(waited.begin(), waited.end());
  if (*least == *most) return {};
  return "rank " + std::to_string(least - waited.begin()) + " hangs, or does something else than the others";
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
