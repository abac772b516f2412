// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/epoch_order.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace gradaccum::detail {

/// Mixes all bits of both numbers (splitmix64's mixing step) into 32, since the generator uses 32 bits of its seed.
GRADACCUM_INLINE at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch) {
  auto z = seed + 0x9E3779B97F4A7C15u * (static_cast<std::uint64_t>(epoch) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return at::make_generator<at::CPUGeneratorImpl>((z ^ (z >> 31)) >> 32);
}

GRADACCUM_INLINE void ShareOfRank::check(const char* owner) const {
  TORCH_CHECK(world_size >= 1 && 0 <= rank && rank < world_size, owner, ": rank must be in [0, world_size), got ", rank,
              " of ", world_size);
}

GRADACCUM_INLINE std::int64_t EpochOrder::begin_loop() {
  if (state_.batch > 0 && !resumed_) state_ = {state_.epoch + 1, 0};  // the last loop was left early
  resumed_ = false;
  return ++count_;
}

GRADACCUM_INLINE void EpochOrder::check_is_last(std::int64_t loop) const {
  TORCH_CHECK(count_ == loop, name(), ": a second loop began inside this one; give it a copy");
}

GRADACCUM_INLINE std::optional<std::int64_t> EpochOrder::next() {
  if (state_.batch < size_of(state_.epoch)) return share().nth(state_.batch);
  state_ = {state_.epoch + 1, 0};
  return {};
}

GRADACCUM_INLINE void EpochOrder::load_state(const State& state) {
  check(state);
  state_ = state;
  resumed_ = true;
}

GRADACCUM_INLINE void EpochOrder::state(Archive& archive) {
  auto next = state_;
  archive("epoch", next.epoch);
  archive("batch", next.batch);
  if (archive.changes_allowed() && next.epoch >= 0) next.batch = std::min(next.batch, size_of(next.epoch));
  check(next);
  archive.setting("world_size", share().world_size);
  archive.setting("batches", size_of(next.epoch));
  archive.setting("last_batch", fingerprint(next));
  if (archive.loading()) archive.when_all_fit([this, next] { load_state(next); });
}

GRADACCUM_INLINE void EpochOrder::go_back(const Place& place) {
  state_ = place.state;
  resumed_ = place.resumed;
}

GRADACCUM_INLINE void EpochOrder::check(const State& state) const {
  TORCH_CHECK(state.epoch >= 0 && state.epoch < std::numeric_limits<std::int64_t>::max(), name(),
              ": a state must have an epoch >= 0 that another can follow, got ", state.epoch);
  const auto size = size_of(state.epoch);
  TORCH_CHECK(state.batch >= 0 && state.batch <= size, name(), ": a state must have an epoch and a batch of 0 to ",
              size, ", got ", state.epoch, " and ", state.batch);
}

GRADACCUM_INLINE std::string EpochOrder::fingerprint(const State& at) const {
  if (size_of(at.epoch) == 0) return "none";
  return fingerprint_at(at.epoch, share().nth(std::max<std::int64_t>(at.batch - 1, 0)));
}

GRADACCUM_INLINE std::string EpochOrder::name() const { return type_name(*this); }

}  // namespace gradaccum::detail
