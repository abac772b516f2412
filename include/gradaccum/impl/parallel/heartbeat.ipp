// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>

#include <gradaccum/impl/begin.ipp>

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

GRADACCUM_INLINE std::string have_ended(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return ranks.size() == 1 ? "rank " + text + " has ended or hangs" : "ranks " + text + " have ended or hang";
}

GRADACCUM_INLINE RollCall::RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), size_(world_size) {}
GRADACCUM_INLINE RollCall::~RollCall() = default;

GRADACCUM_INLINE void RollCall::say_waited(std::int64_t times) {
  if (times > 0) add(waits_of(rank_), times);
}

GRADACCUM_INLINE void RollCall::say_failed(const std::string& what) {
  store_->set("failure", std::vector<std::uint8_t>(what.begin(), what.end()));
  ++answers_;
}

GRADACCUM_INLINE std::optional<std::string> RollCall::failure() {
  const bool known = store_->check({"failure"});
  ++answers_;
  return known ? std::optional(get("failure")) : std::nullopt;
}

GRADACCUM_INLINE std::optional<std::string> RollCall::missing() {
  const auto now = counts(0, size_);
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (now[static_cast<std::size_t>(rank)] == counts_[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
  return ranks.empty() ? std::nullopt : std::optional(have_ended(ranks));
}

GRADACCUM_INLINE std::optional<std::string> RollCall::behind() {
  const auto waited = read(waits_of, 0, size_);
  const auto [least, most] = std::minmax_element(waited.begin(), waited.end());
  if (*least == *most) return {};
  return "rank " + std::to_string(least - waited.begin()) + " hangs, or does something else than the others";
}

GRADACCUM_INLINE void RollCall::leave(std::chrono::milliseconds longest) {
  const auto begin = std::chrono::steady_clock::now();
  add(count_of(rank_), left);  // no rank must report it as missing
  auto gone = add("left", 1);
  while (rank_ == 0 && gone < size_ && std::chrono::steady_clock::now() - begin < longest) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    gone = add("left", 0);
  }
}

GRADACCUM_INLINE std::int64_t RollCall::add(const std::string& key, std::int64_t number) {
  const auto sum = store_->add(key, number);
  ++answers_;
  return sum;
}

GRADACCUM_INLINE std::string RollCall::get(const std::string& key) {
  const auto bytes = store_->get(key);
  ++answers_;
  return {bytes.begin(), bytes.end()};
}

/// Reads all counters in one request if the store supports that, since there may be hundreds.
GRADACCUM_INLINE std::vector<std::int64_t> RollCall::read(Key key_of, int first, int last) {
  std::vector<std::string> keys;
  for (int rank = first; rank < last; ++rank) keys.push_back(key_of(rank));
  for (auto& key : keys)
    if (known_.insert(key).second) add(key, 0);  // the store would wait for a missing key
  std::vector<std::int64_t> numbers;
  if (!store_->hasExtendedApi()) {
    for (auto& key : keys) numbers.push_back(std::stoll(get(key)));
    return numbers;
  }
  for (auto& bytes : store_->multiGet(keys)) numbers.push_back(std::stoll(std::string(bytes.begin(), bytes.end())));
  ++answers_;
  return numbers;
}

GRADACCUM_INLINE Watch::Watch(int rank, int world_size, std::chrono::milliseconds longest)
    : first_(rank == 0 ? 1 : 0),
      last_(rank == 0 ? world_size : 1),
      silences_(static_cast<std::size_t>(last_ - first_), Silence(longest)) {}

GRADACCUM_INLINE std::vector<int> Watch::silent(RollCall& roll_call) {
  const auto counts = roll_call.counts(first_, last_);
  std::vector<int> ranks;
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (silences_[i].too_long(counts[i]) && counts[i] > 0 && counts[i] < RollCall::left)
      ranks.push_back(first_ + static_cast<int>(i));
  return ranks;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
