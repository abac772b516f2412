// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/silence.hpp>

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace gradaccum::detail {

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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/roll_call.ipp>
#endif
