// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/roll_call.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace gradaccum::detail {

/// The state that the counting and the waiting thread share.
struct Heartbeat::Shared {
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds interval{250};
  static constexpr int beats_a_watch = 4;
  static constexpr Milliseconds standstill{2000};  ///< time in which a live process must count
  static constexpr Milliseconds patience{10000};   ///< longest wait for the store

  Shared(c10::intrusive_ptr<c10d::Store> store, std::string given_place, int rank, int world_size,
         Milliseconds given_silence)
      : roll_call(std::move(store), rank, world_size),
        watch(rank, world_size, given_silence),
        place(std::move(given_place)),
        silence(given_silence) {}

  RollCall roll_call;
  Watch watch;
  std::string place;
  Milliseconds silence;
  int beats = 0;
  std::int64_t waits = 0, told = 0;  // waits for other processes: all, and those in the store

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, stopped = false, asked = false, unanswered = false;
  std::optional<std::string> failure, to_announce;

  void run() {
    try {
      do beat();
      while (pause(interval));
      roll_call.leave(failed() ? standstill : patience / 2);
    } catch (const std::exception&) {
      fail(place + " has ended, or cannot be reached");
    }
    const std::lock_guard lock(mutex);
    stopped = true;
    changed.notify_all();
  }

  /// Ends the thread. Returns true if it hangs.
  bool stop() {
    std::unique_lock lock(mutex);
    stopping = true;
    changed.notify_all();
    return !changed.wait_for(lock, unanswered ? Milliseconds(0) : patience, [this] { return stopped; });
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
  /// Reports a failure to all processes.
  void fail_all(const std::string& text) {
    roll_call.say_failed(text);
    fail(text);
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
    if (ours) return fail_all(*ours);
    if (wanted) return look_for_the_missing();
    if (beats++ % beats_a_watch == 0) look_for_the_silent();
  }

  /// Finds the cause of a failure. This process goes on counting meanwhile.
  void look_for_the_missing() {
    roll_call.note_counts();
    const auto begin = Clock::now();
    while (Clock::now() - begin < standstill) {
      roll_call.say_present();
      if (!pause(interval)) return;
    }
    auto who = roll_call.missing();
    if (!who) who = roll_call.behind();
    if (roll_call.failure()) return;  // another process was faster; its report is read at the next beat
    fail_all(who ? *who : "all processes are there, but the connection between two of them is lost");
  }

  void look_for_the_silent() {
    const auto ranks = watch.silent(roll_call);
    if (!ranks.empty() && !failed()) fail_all(have_ended(ranks) + out_of_reach());
  }
  std::string out_of_reach() const {
    return ", or cannot be reached: silent for " + std::to_string(silence.count() / 1000) + " s";
  }

  /// Waits, and returns false when the thread must end.
  bool pause(Milliseconds time) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, time, [this] { return stopping || (to_announce && !failure); });
    return !stopping;
  }

  /// Checks `done()` when woken, and after each `step`.
  bool wait(const std::function<bool()>& done, std::chrono::microseconds step, Clock::time_point end) {
    std::unique_lock lock(mutex);
    ++waits;
    Silence of_store(silence);
    while (!done() && !failure && Clock::now() < end) {
      unanswered = of_store.too_long(roll_call.answers());
      if (unanswered)
        failure = place + " has ended or hangs" + out_of_reach();
      else
        changed.wait_for(lock, step);
    }
    return done();
  }
};

GRADACCUM_INLINE Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string place, int rank,
                                      int world_size, std::chrono::milliseconds silence)
    : shared_(std::make_shared<Shared>(std::move(store), std::move(place), rank, world_size, silence)) {
  thread_ = std::thread([shared = shared_] { shared->run(); });
}

GRADACCUM_INLINE Heartbeat::~Heartbeat() {
  const bool hangs = shared_->stop();
  if (hangs)
    thread_.detach();  // it hangs in a store that does not answer
  else
    thread_.join();
}

GRADACCUM_INLINE bool Heartbeat::wait(const std::function<bool()>& done) {
  return shared_->wait(done, Shared::interval, Shared::Clock::time_point::max());
}

GRADACCUM_INLINE bool Heartbeat::poll(const std::function<bool()>& done, std::chrono::milliseconds longest) {
  return shared_->wait(done, std::chrono::microseconds(50), Shared::Clock::now() + longest);
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
