// SPDX-License-Identifier: Apache-2.0
// Moves a position over the epochs of a range, and saves it.
#pragma once

#include <gradaccum/data/epoch_order.hpp>

#include <gradaccum/detail/types/types.hpp>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::data {

GRADACCUM_INLINE std::int64_t EpochOrder::begin_loop() {
  auto& state = place_.state;
  if (state.batch > 0 && !place_.resumed) state = {state.epoch + 1, 0};  // the last loop was left early
  place_.resumed = false;
  return ++count_;
}

GRADACCUM_INLINE std::optional<std::int64_t> EpochOrder::next(std::int64_t loop) {
  TORCH_CHECK(count_ == loop, detail::type_name(*this), ": a second loop began inside the first; give it a copy");
  auto& state = place_.state;
  if (state.batch < size_of(state.epoch)) return share().nth(state.batch);
  state = {state.epoch + 1, 0};
  return {};
}

GRADACCUM_INLINE void EpochOrder::load_state(const State& state) {
  check(state);
  place_ = {state, /*resumed=*/true};
}

/// Converts the positions of the ranks that saved a state to the position of this rank among another number of ranks:
/// together they have seen the first batches of the epoch. A rank may already be at the start of the next epoch.
GRADACCUM_INLINE EpochOrder::State EpochOrder::dealt_anew(const Archive& archive) const {
  const auto epochs = archive.of_ranks<std::int64_t>("epoch");
  auto batches = archive.of_ranks<std::int64_t>("batch");
  for (const auto each : batches)
    TORCH_CHECK(each >= 0 && each < std::numeric_limits<std::int64_t>::max() / std::ssize(batches),
                detail::type_name(*this), ": a state's batch must be >= 0 and fit into an epoch, got ", each);
  const auto last = std::max<std::int64_t>(batches.front() - 1, 0) * std::ssize(batches);  // rank 0's
  const auto print = archive.of_ranks<std::string>("last_batch").front();
  const auto epoch = std::ranges::min(epochs);
  for (const auto each : epochs) check({each, 0});
  const auto share_of = [&](std::size_t rank) {
    return detail::ShareOfRank{static_cast<std::int64_t>(rank), std::ssize(batches)};
  };
  bool in_order = archive.of_ranks<std::int64_t>("world_size").front() == std::ssize(batches);
  std::int64_t taken = 0;
  for (std::size_t rank = 0; rank < batches.size(); ++rank) {
    const bool is_over = epochs[rank] == epoch + 1 && batches[rank] == 0;
    if (is_over) batches[rank] = share_of(rank).of(all_of(epoch));
    in_order = in_order && (is_over || epochs[rank] == epoch);
    taken += batches[rank];
  }
  for (std::size_t rank = 0; rank < batches.size(); ++rank)
    in_order = in_order && batches[rank] == share_of(rank).of(taken);
  in_order = in_order && taken <= all_of(epoch) && last < all_of(epochs.front());
  TORCH_CHECK(taken == 0 || (in_order && print == fingerprint_at(epochs.front(), last)), detail::type_name(*this),
              ": the state was saved in the middle of epoch ", epoch, " by ", batches.size(), " rank(s), after ",
              c10::Join(", ", batches),
              " batches; another number of ranks can resume there only with the same data, and if the ranks took its "
              "first batches: resume with as many ranks until the epoch ends");
  return {epoch, share().of(taken)};
}

GRADACCUM_INLINE void EpochOrder::state(Archive& archive) {
  auto next = place_.state;
  archive("epoch", next.epoch);
  archive("batch", next.batch);
  archive.setting("world_size", share().world_size);
  if (archive.loading() &&
      (archive.ranks().are_others() || archive.of_ranks<std::int64_t>("world_size").front() != share().world_size))
    next = dealt_anew(archive);
  else if (archive.changes_allowed() && next.epoch >= 0)
    next.batch = std::min(next.batch, size_of(next.epoch));
  check(next);
  const auto size = size_of(next.epoch), last = share().nth(std::max<std::int64_t>(next.batch - 1, 0));
  archive.setting("batches", size);
  archive.setting("last_batch", size == 0 ? "none" : fingerprint_at(next.epoch, last));
  if (archive.loading()) archive.when_all_fit([this, next] { load_state(next); });
}

GRADACCUM_INLINE void EpochOrder::check(const State& state) const {
  TORCH_CHECK(state.epoch >= 0 && state.epoch < std::numeric_limits<std::int64_t>::max(), detail::type_name(*this),
              ": a state's epoch must be >= 0 and have a next one, got ", state.epoch);
  const auto size = size_of(state.epoch);
  TORCH_CHECK(state.batch >= 0 && state.batch <= size, detail::type_name(*this), ": a state's batch must be in [0, ",
              size, "], got ", state.batch, " in epoch ", state.epoch);
}

}  // namespace gradaccum::data

#undef GRADACCUM_INLINE
