// SPDX-License-Identifier: Apache-2.0
// Detects ranks that have ended, by counters in the store.
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <gradaccum/detail/types/types.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string have_ended(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return ranks.size() == 1 ? "rank " + text + " has ended or hangs" : "ranks " + text + " have ended or hang";
}

/// The entries of processes in their store: counters that show that each is alive and how far it is, and a failure. For
/// use by one thread, except for `answers`. Each call waits for the store.
class HeartbeatEntries {
 public:
  HeartbeatEntries(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), size_(world_size) {}

  /// The number of times that the store has counted, which stops increasing while the store does not answer.
  std::int64_t answers() const { return answers_; }

  void count_beat() { add(beats_of(rank_), 1); }
  /// Adds to the number of times that this process has waited for others.
  void count_waits(std::int64_t times) {
    if (times > 0) add(waits_of(rank_), times);
  }
  void set_failure(const std::string& what) { store_->set("failure", what); }
  std::optional<std::string> failure() {
    return store_->check({"failure"}) ? std::optional(store_->get_to_str("failure")) : std::nullopt;
  }

  /// Returns the beats of ranks in [`first`, `last`): 0 before a rank starts, at least `left` after it has left.
  std::vector<std::int64_t> beats(int first, int last) { return read(beats_of, first, last); }
  static constexpr std::int64_t left = std::int64_t{1} << 62;

  /// Returns the ranks whose beats have stopped since they were `before`, in words; else the rank that has waited the
  /// fewest times; else nullopt.
  std::optional<std::string> missing_since(const std::vector<std::int64_t>& before) {
    const auto now = beats(0, size_);
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < now.size(); ++rank)
      if (now[rank] == before[rank]) ranks.push_back(static_cast<int>(rank));
    if (!ranks.empty()) return have_ended(ranks);
    const auto waits = read(waits_of, 0, size_);
    const auto [least, most] = std::ranges::minmax_element(waits);
    if (*least == *most) return {};
    return "rank " + std::to_string(least - waits.begin()) + " hangs, or does something else than the others";
  }

  /// Marks this rank as having left. Rank 0, whose process has the store, waits for the others, but at most `longest`.
  void leave(std::chrono::milliseconds longest) {
    const auto begin = std::chrono::steady_clock::now();
    add(beats_of(rank_), left);  // no rank must report it as missing
    auto gone = add("left", 1);
    while (rank_ == 0 && gone < size_ && std::chrono::steady_clock::now() - begin < longest) {
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
      gone = add("left", 0);
    }
  }

 private:
  static std::string beats_of(int rank) { return "heartbeat/" + std::to_string(rank); }
  static std::string waits_of(int rank) { return "waits/" + std::to_string(rank); }

  std::int64_t add(const std::string& key, std::int64_t number) {
    const auto sum = store_->add(key, number);
    ++answers_;
    return sum;
  }
  /// Reads all counters in one request if the store supports that, since there may be hundreds.
  std::vector<std::int64_t> read(std::string (*key_of)(int rank), int first, int last) {
    std::vector<std::string> keys;
    for (int rank = first; rank < last; ++rank) keys.push_back(key_of(rank));
    for (auto& key : keys)
      if (known_.insert(key).second) add(key, 0);  // the store would wait for a missing key
    std::vector<std::int64_t> numbers;
    if (store_->hasExtendedApi())
      for (auto& bytes : store_->multiGet(keys)) numbers.push_back(std::stoll(std::string(bytes.begin(), bytes.end())));
    else
      for (auto& key : keys) numbers.push_back(std::stoll(store_->get_to_str(key)));
    return numbers;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::set<std::string> known_;  // keys that are in the store
  std::atomic<std::int64_t> answers_ = 0;
};

/// The state that the counting and the waiting thread share.
struct Heartbeat::Shared {
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds interval{250};
  static constexpr int beats_a_check = 4;
  static constexpr Milliseconds standstill{2000};  ///< time in which a live process must count
  static constexpr Milliseconds patience{10000};   ///< longest wait for the store

  Shared(c10::intrusive_ptr<c10d::Store> store, std::string given_name, int rank, int world_size,
         Milliseconds given_timeout)
      : entries(std::move(store), rank, world_size),
        store_name(std::move(given_name)),
        size(world_size),
        first_checked(rank == 0 ? 1 : 0),
        checked(static_cast<std::size_t>(rank == 0 ? world_size - 1 : 1), StallDetector(given_timeout)),
        timeout(given_timeout) {}

  HeartbeatEntries entries;
  const std::string store_name;
  const int size, first_checked;
  std::vector<StallDetector> checked;  // of all others on rank 0, and of rank 0 elsewhere
  const Milliseconds timeout;
  int beats = 0;
  std::int64_t waits = 0, counted_waits = 0;  // waits for other processes: all, and those in the store

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, stopped = false, asked = false, unanswered = false;
  std::optional<std::string> failure, to_announce;

  void run() {
    try {
      do beat();
      while (pause(interval));
      entries.leave(failed() ? standstill : patience / 2);
    } catch (const std::exception&) {
      fail(store_name + " has ended, or cannot be reached");
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
    entries.set_failure(text);
    fail(text);
  }

  void beat() {
    entries.count_beat();
    std::optional<std::string> ours;
    bool wanted = false;
    std::int64_t new_waits = 0;
    {
      const std::lock_guard lock(mutex);
      ours = to_announce;
      wanted = asked && !failure;
      new_waits = waits - std::exchange(counted_waits, waits);
    }
    entries.count_waits(new_waits);
    if (const auto theirs = entries.failure()) return fail(*theirs);
    if (ours) return fail_all(*ours);
    if (wanted) return find_cause();
    if (beats++ % beats_a_check == 0) find_stalled();
  }

  /// Finds the cause of a failure. The heartbeat of this process continues.
  void find_cause() {
    const auto before = entries.beats(0, size);
    const auto begin = Clock::now();
    while (Clock::now() - begin < standstill) {
      entries.count_beat();
      if (!pause(interval)) return;
    }
    const auto who = entries.missing_since(before);
    if (entries.failure()) return;  // another process was faster; its report is read at the next beat
    fail_all(who.value_or("all processes are there, but the connection between two of them is lost"));
  }

  /// Finds ranks whose beats have stopped without their having left.
  void find_stalled() {
    const auto now = entries.beats(first_checked, first_checked + static_cast<int>(checked.size()));
    std::vector<int> ranks;
    for (std::size_t i = 0; i < now.size(); ++i)
      if (checked[i].stalled(now[i]) && now[i] > 0 && now[i] < HeartbeatEntries::left)
        ranks.push_back(first_checked + static_cast<int>(i));
    if (!ranks.empty() && !failed()) fail_all(have_ended(ranks) + out_of_reach());
  }
  std::string out_of_reach() const {
    return ", or cannot be reached: silent for " + std::to_string(timeout.count() / 1000) + " s";
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
    StallDetector of_store(timeout);
    while (!done() && !failure && Clock::now() < end) {
      unanswered = of_store.stalled(entries.answers());
      if (unanswered)
        failure = store_name + " has ended or hangs" + out_of_reach();
      else
        changed.wait_for(lock, step);
    }
    return done();
  }
};

GRADACCUM_INLINE Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string store_name, int rank,
                                      int world_size, std::chrono::milliseconds timeout)
    : shared_(std::make_shared<Shared>(std::move(store), std::move(store_name), rank, world_size, timeout)) {
  thread_ = starting_thread("ProcessGroup", [&] { return std::thread([shared = shared_] { shared->run(); }); });
}

GRADACCUM_INLINE Heartbeat::~Heartbeat() {
  if (shared_->stop())
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

GRADACCUM_INLINE bool Heartbeat::failed() const { return shared_->failed(); }

GRADACCUM_INLINE std::string Heartbeat::explain() {
  auto& all = *shared_;
  std::unique_lock lock(all.mutex);
  all.asked = true;
  all.changed.wait_for(lock, Shared::patience, [&] { return all.failure || all.stopped; });
  return all.failure ? *all.failure : all.store_name + " has ended or hangs";
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

#undef GRADACCUM_INLINE
