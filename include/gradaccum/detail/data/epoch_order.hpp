// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/types/type_name.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>

namespace gradaccum::detail {

/// The random numbers of an epoch: they depend on the seed and the epoch alone.
///
/// The generator looks at 32 bits of its seed: all bits of both numbers go into them (splitmix64's mixing step).
inline at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch) {
  auto z = seed + 0x9E3779B97F4A7C15u * (static_cast<std::uint64_t>(epoch) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return at::make_generator<at::CPUGeneratorImpl>((z ^ (z >> 31)) >> 32);
}

/// Which of an epoch's batches are this rank's: every `world_size`-th, from the `rank`-th on.
struct ShareOfRank {
  std::int64_t rank = 0, world_size = 1;

  void check(const char* owner) const {
    TORCH_CHECK(world_size >= 1 && 0 <= rank && rank < world_size, owner, ": rank must be in [0, world_size), got ",
                rank, " of ", world_size);
  }
  std::int64_t of(std::int64_t batches) const { return (batches - rank + world_size - 1) / world_size; }
  std::int64_t nth(std::int64_t own) const { return own * world_size + rank; }
};

/// Loops over batches in the order of an epoch: one loop at a time, an epoch a loop, a state to go on from.
///
/// `Batches` derives from it, and has, for its friend, this base: `all_of(epoch)`, the number of batches of all
/// ranks, `batch_at(epoch, number)` of these, and `share()`.
template <class Batches, class Batch>
class EpochLoops {
 public:
  /// Where a run is: enough to go on from there with the same batches.
  struct State {
    std::int64_t epoch = 0;  ///< of the loop that runs, or of the next one
    std::int64_t batch = 0;  ///< the next one in it
    bool operator==(const State&) const = default;
  };

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(EpochLoops& loops) : loops_(&loops), loop_(loops.count_) { ++*this; }
    Batch& operator*() const { return batch_; }
    Batch* operator->() const { return &batch_; }
    Iterator& operator++() {
      TORCH_CHECK(loops_->count_ == loop_, loops_->name(), ": a second loop began inside this one; give it a copy");
      if (!loops_->next(batch_)) loops_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return loops_ == nullptr; }

   private:
    EpochLoops* loops_;
    std::int64_t loop_;
    mutable Batch batch_;  // an input iterator gives what it holds, whether it is const or not
  };

  Iterator begin() {
    if (state_.batch > 0 && !resumed_) state_ = {state_.epoch + 1, 0};  // the last loop was left early
    resumed_ = false;
    ++count_;
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  const State& state() const { return state_; }
  /// The next loop goes on from here.
  void load_state(const State& state) {
    check(state);
    state_ = state;
    resumed_ = true;
  }

  /// Saves or loads where a run is. Other data is an error, known by its number of batches and by the last batch.
  void state(Archive& archive) {
    auto next = state_;
    archive("epoch", next.epoch);
    archive("batch", next.batch);
    if (archive.changes_allowed() && next.epoch >= 0) next.batch = std::min(next.batch, size_of(next.epoch));
    check(next);
    archive.setting("world_size", batches().share().world_size);
    archive.setting("batches", size_of(next.epoch));
    archive.setting("last_batch", fingerprint(next));
    if (archive.loading()) archive.when_all_fit([this, next] { load_state(next); });
  }

 private:
  friend Batches;
  EpochLoops() = default;

  void check(const State& state) {
    TORCH_CHECK(state.epoch >= 0 && state.epoch < std::numeric_limits<std::int64_t>::max(), name(),
                ": a state must have an epoch >= 0 that another can follow, got ", state.epoch);
    const auto size = size_of(state.epoch);
    TORCH_CHECK(state.batch >= 0 && state.batch <= size, name(), ": a state must have an epoch and a batch of 0 to ",
                size, ", got ", state.epoch, " and ", state.batch);
  }
  std::string fingerprint(const State& at) {
    if (size_of(at.epoch) == 0) return "none";
    return fingerprint_of(batch_at({at.epoch, std::max<std::int64_t>(at.batch - 1, 0)}));
  }
  Batches& batches() { return static_cast<Batches&>(*this); }
  /// This rank's.
  std::int64_t size_of(std::int64_t epoch) { return batches().share().of(batches().all_of(epoch)); }
  Batch batch_at(const State& at) { return batches().batch_at(at.epoch, batches().share().nth(at.batch)); }
  std::string name() { return type_name(batches()); }

  bool next(Batch& batch) {
    if (state_.batch == size_of(state_.epoch)) {
      state_ = {state_.epoch + 1, 0};
      return false;
    }
    batch = batch_at(state_);
    ++state_.batch;
    return true;
  }

  State state_;
  std::int64_t count_ = 0;  // of loops begun
  bool resumed_ = false;
};

}  // namespace gradaccum::detail
