// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/roll_call.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstddef>
#include <thread>
#include <utility>

namespace gradaccum::detail {

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
