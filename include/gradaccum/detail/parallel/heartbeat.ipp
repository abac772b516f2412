// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What processes write into their store: counts that show that each is there and how far it has come, and what has
/// gone wrong. For one thread; each call waits for the store.
class RollCall {
 public:
  RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), counts_(static_cast<std::size_t>(world_size)) {}

  void say_present() { store_->add(count_of(rank_), 1); }
  /// This process has waited so many times more for others.
  void say_waited(std::int64_t times) {
    if (times > 0) store_->add(waits_of(rank_), times);
  }
  void say_failed(const std::string& what) {
    store_->set("failure", std::vector<std::uint8_t>(what.begin(), what.end()));
  }
  std::optional<std::string> failure() {
    if (!store_->check({"failure"})) return {};
    const auto text = store_->get("failure");
    return std::string(text.begin(), text.end());
  }

  /// Of all, for `missing` to compare with, later.
  void note_counts() {
    for (int rank = 0; rank < size(); ++rank) counts_[static_cast<std::size_t>(rank)] = store_->add(count_of(rank), 0);
  }
  /// `rank 1 has ended or hangs`: whose counts stand still.
  std::optional<std::string> missing() {
    std::string ranks;
    int number = 0;
    for (int rank = 0; rank < size(); ++rank) {
      if (store_->add(count_of(rank), 0) != counts_[static_cast<std::size_t>(rank)]) continue;
      ranks += (number++ > 0 ? ", " : "") + std::to_string(rank);
    }
    if (number == 0) return {};
    return number == 1 ? "rank " + ranks + " has ended or hangs" : "ranks " + ranks + " have ended or hang";
  }

  /// All are there, but some have not come to where the others wait.
  std::optional<std::string> behind() {
    std::vector<std::int64_t> waited;
    for (int rank = 0; rank < size(); ++rank) waited.push_back(store_->add(waits_of(rank), 0));
    const auto [least, most] = std::minmax_element(waited.begin(), waited.end());
    if (*least == *most) return {};
    return "rank " + std::to_string(least - waited.begin()) + " hangs, or does something else than the others";
  }

  /// Rank 0's process has the store, and so ends last; but for what is gone, or has yet to hear of that.
  void leave(std::chrono::milliseconds longest) {
    const auto begin = std::chrono::steady_clock::now();
    auto left = store_->add("left", 1);
    while (rank_ == 0 && left < size() && std::chrono::steady_clock::now() - begin < longest) {
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
      left = store_->add("left", 0);
    }
  }

 private:
  int size() const { return static_cast<int>(counts_.size()); }
  static std::string count_of(int rank) { return "heartbeat/" + std::to_string(rank); }
  static std::string waits_of(int rank) { return "waits/" + std::to_string(rank); }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<std::int64_t> counts_;
};

/// What the thread that counts and the one that waits have in common.
struct Heartbeat::Shared {
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds interval{250};
  static constexpr Milliseconds silence{2000};    ///< of a process that is gone, or hangs
  static constexpr Milliseconds patience{10000};  ///< for an answer of the store

  Shared(RollCall given_roll_call, std::string given_place)
      : roll_call(std::move(given_roll_call)), place(std::move(given_place)) {}

  RollCall roll_call;
  std::string place;
  std::int64_t waits = 0, told = 0;  // how often this process has waited for others; and what they know of it

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, stopped = false, asked = false;
  std::optional<std::string> failure, to_announce;

  void run() {
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

  /// True if the thread hangs.
  bool stop() {
    std::unique_lock lock(mutex);
    stopping = true;
    changed.notify_all();
    return !changed.wait_for(lock, patience, [this] { return stopped; });
  }

  bool failed() {
    const std::lock_guard lock(mutex);
    return failure.has_value();
  }
  void fail(std::string text) {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::move(text);
    changed.notify_all();
  }

  void beat() {
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
  void look_for_the_missing() {
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

  /// False when it is time to end.
  bool pause(Milliseconds time) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, time, [this] { return stopping || (to_announce && !failure); });
    return !stopping;
  }
};

GRADACCUM_INLINE Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string place, int rank,
                                      int world_size)
    : shared_(std::make_shared<Shared>(RollCall(std::move(store), rank, world_size), std::move(place))) {
  thread_ = std::thread([shared = shared_] { shared->run(); });
}

GRADACCUM_INLINE Heartbeat::~Heartbeat() {
  const bool hangs = shared_->stop();
  if (hangs)
    thread_.detach();  // in a store that does not answer
  else
    thread_.join();
}

GRADACCUM_INLINE bool Heartbeat::wait(const std::function<bool()>& done) {
  std::unique_lock lock(shared_->mutex);
  ++shared_->waits;
  shared_->changed.wait(lock, [&] { return done() || shared_->failure; });
  return done();
}

GRADACCUM_INLINE bool Heartbeat::poll(const std::function<bool()>& done, std::chrono::milliseconds longest) {
  const auto end = std::chrono::steady_clock::now() + longest;
  std::unique_lock lock(shared_->mutex);
  ++shared_->waits;
  while (!done() && !shared_->failure && std::chrono::steady_clock::now() < end)
    shared_->changed.wait_for(lock, std::chrono::microseconds(50));
  return done();
}

GRADACCUM_INLINE std::function<void()> Heartbeat::wake() const {
  return [shared = shared_] {
    { const std::lock_guard lock(shared->mutex); }
    shared->changed.notify_all();
  };
}

GRADACCUM_INLINE std::string Heartbeat::explain() {
  auto& all = *shared_;
  std::unique_lock lock(all.mutex);
  all.asked = true;
  all.changed.wait_for(lock, Shared::patience, [&] { return all.failure || all.stopped; });
  return all.failure ? *all.failure : all.place + " has ended or hangs";
}

GRADACCUM_INLINE void Heartbeat::announce(std::string failure) {
  auto& all = *shared_;
  std::unique_lock lock(all.mutex);
  if (all.failure) return;
  all.to_announce = std::move(failure);
  all.changed.notify_all();
  all.changed.wait_for(lock, Shared::patience, [&] { return all.failure || all.stopped; });
}

}  // namespace gradaccum::detail
