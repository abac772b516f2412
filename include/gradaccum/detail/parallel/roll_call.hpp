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

/// `rank 1 has ended or hangs`
std::string have_ended(const std::vector<int>& ranks);

/// What processes write into their store: counts that show that each is there and how far it has come, and what has
/// gone wrong. For one thread, but for `answers`; each call waits for the store.
class RollCall {
 public:
  RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;
  ~RollCall();

  /// Of the store, so far: they stand still while it is silent.
  std::int64_t answers() const { return answers_; }

  void say_present() { add(count_of(rank_), 1); }
  /// This process has waited so many times more for others.
  void say_waited(std::int64_t times);
  void say_failed(const std::string& what);
  std::optional<std::string> failure();

  /// Of the ranks from `first` to the one before `last`: 0 before a rank has come, and `left` or more after it has
  /// left.
  std::vector<std::int64_t> counts(int first, int last) { return read(count_of, first, last); }
  static constexpr std::int64_t left = std::int64_t{1} << 62;

  /// Of all, for `missing` to compare with, later.
  void note_counts() { counts_ = counts(0, size_); }
  /// `rank 1 has ended or hangs`: whose counts stand still.
  std::optional<std::string> missing();
  /// All are there, but some have not come to where the others wait.
  std::optional<std::string> behind();

  /// Rank 0's process has the store, and so ends last; but for what is gone, or has yet to hear of that.
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

/// Rank 0 watches all others, and they watch rank 0: what it sees they hear of, and hundreds of ranks ask for hundreds
/// of counts only once.
class Watch {
 public:
  Watch(int rank, int world_size, std::chrono::milliseconds longest);

  /// Those that have counted, do no longer, and have not left.
  std::vector<int> silent(RollCall& roll_call);

 private:
  int first_, last_;
  std::vector<Silence> silences_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/roll_call.ipp>
#endif
