// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

/// Detects a counter that has stopped for too long. Each call adds at most a second, so that time in which the observer
/// itself was suspended, or got no processor, does not count.
class Silence {
 public:
  explicit Silence(std::chrono::milliseconds longest) : longest_(longest) {}

  bool too_long(std::int64_t count) {
    const auto now = Clock::now();
    const auto step = std::min<Clock::duration>(now - std::exchange(looked_, now), longest_step);
    so_far_ = count == std::exchange(count_, count) ? so_far_ + step : Clock::duration::zero();
    return so_far_ >= longest_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds longest_step{1};

  Clock::duration longest_, so_far_ = Clock::duration::zero();
  Clock::time_point looked_ = Clock::now();
  std::int64_t count_ = -1;
};

/// Returns the ranks in words: `rank 1 has ended or hangs`.
std::string have_ended(const std::vector<int>& ranks);

/// The entries of processes in their store: counters that show that each is alive and how far it is, and a failure. For
/// use by one thread, except for `answers`. Each call waits for the store.
class RollCall {
 public:
  RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;
  ~RollCall();

  /// The number of answers from the store so far, which stops increasing while the store is silent.
  std::int64_t answers() const { return answers_; }

  void say_present() { add(count_of(rank_), 1); }
  /// Adds to the number of times that this process has waited for others.
  void say_waited(std::int64_t times);
  void say_failed(const std::string& what);
  std::optional<std::string> failure();

  /// Returns the counters of ranks in [`first`, `last`): 0 before a rank starts, at least `left` after it has left.
  std::vector<std::int64_t> counts(int first, int last) { return read(count_of, first, last); }
  static constexpr std::int64_t left = std::int64_t{1} << 62;

  /// Stores all counters for `missing` to compare with.
  void note_counts() { counts_ = counts(0, size_); }
  /// Returns the ranks whose counters have stopped since `note_counts`, in words; nullopt if there are none.
  std::optional<std::string> missing();
  /// Returns the rank that has waited the fewest times, in words; nullopt if all have waited equally often.
  std::optional<std::string> behind();

  /// Marks this rank as having left. Rank 0, whose process has the store, waits for the others, but at most `longest`.
  void leave(std::chrono::milliseconds longest);

 private:
  using Key = std::string (*)(int rank);
  static std::string count_of(int rank) { return "heartbeat/" + std::to_string(rank); }
  static std::string waits_of(int rank) { return "waits/" + std::to_string(rank); }

  std::int64_t add(const std::string& key, std::int64_t number);
  std::string get(const std::string& key);
  std::vector<std::int64_t> read(Key key_of, int first, int last);

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::set<std::string> known_;  // keys that are in the store
  std::vector<std::int64_t> counts_;
  std::atomic<std::int64_t> answers_ = 0;
};

/// Lets rank 0 check all others, and these only rank 0, which reports to them: only one rank reads so many counters.
class Watch {
 public:
  Watch(int rank, int world_size, std::chrono::milliseconds longest);

  /// Returns the ranks whose counters have stopped without their having left.
  std::vector<int> silent(RollCall& roll_call);

 private:
  int first_, last_;
  std::vector<Silence> silences_;
};

/// The numbers that ranks exchange when a window closes: one rank's, or the sums over all. Flags are 1 or 0.
struct WindowTotals {
  double weight = 0;  ///< sum of the weights of the micro-batches
  double active = 0;  ///< flag: has closed its own window, rather than only joined others
  double samples = 0, micro_batches = 0;
  double loss = 0;           ///< mean over the window, times its weight
  double stop = 0;           ///< flag: requests the end of the training
  double signal = 0;         ///< flag: has received SIGTERM or a similar signal
  double running = 0;        ///< flag: is inside a window, so that all send the gradients of one more micro-batch
  double unsent = 0;         ///< flag: has gradients that no backward has sent
  std::vector<double> used;  ///< flags by parameter: has a gradient
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/heartbeat.ipp>
#endif
