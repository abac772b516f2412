// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
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
    for (int rank = 0; rank < size(); ++rank) counts_[rank] = store_->add(count_of(rank), 0);
  }
  std::optional<std::string> missing();
  std::optional<std::string> behind();
  void leave(std::chrono::milliseconds longest);

 private:
  int size() const { return static_cast<int>(counts_.size()); }
  static std::string count_of(int rank) { return "heartbeat/" + std::to_string(rank); }
  static std::string waits_of(int rank) { return "waits/" + std::to_string(rank); }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<std::int64_t> counts_;
};

/// `rank 1 has ended or hangs`: whose counts stand still.
inline std::optional<std::string> RollCall::missing() {
  std::string ranks;
  int number = 0;
  for (int rank = 0; rank < size(); ++rank) {
    if (store_->add(count_of(rank), 0) != counts_[rank]) continue;
    ranks += (number++ > 0 ? ", " : "") + std::to_string(rank);
  }
  if (number == 0) return {};
  return number == 1 ? "rank " + ranks + " has ended or hangs" : "ranks " + ranks + " have ended or hang";
}

/// All are there, but some have not come to where the others wait.
inline std::optional<std::string> RollCall::behind() {
  std::vector<std::int64_t> waited;
  for (int rank = 0; rank < size(); ++rank) waited.push_back(store_->add(waits_of(rank), 0));
  const auto [least, most] = std::minmax_element(waited.begin(), waited.end());
  if (*least == *most) return {};
  return "rank " + std::to_string(least - waited.begin()) + " hangs, or does something else than the others";
}

/// Rank 0's process has the store, and so ends last; but for what is gone, or has yet to hear of that.
inline void RollCall::leave(std::chrono::milliseconds longest) {
  const auto begin = std::chrono::steady_clock::now();
  auto left = store_->add("left", 1);
  while (rank_ == 0 && left < size() && std::chrono::steady_clock::now() - begin < longest) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    left = store_->add("left", 0);
  }
}

}  // namespace gradaccum::detail
