// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/fingerprint.hpp>
#include <gradaccum/detail/type_name.hpp>

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

/// Loops over batches in the order of an epoch: one loop at a time, an epoch a loop, a state to go on from.
///
/// `Batches` derives from it, and has `size_of(epoch)` and `batch_at(state)`, for its friend, this base.
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
    if (archive.changes_allowed() && next.epoch >= 0) next.batch = std::min(next.batch, batches().size_of(next.epoch));
    check(next);
    archive.setting("batches", batches().size_of(next.epoch));
    archive.setting("last_batch", fingerprint(next));
    if (archive.loading()) archive.when_all_fit([this, next] { load_state(next); });
  }

 private:
  friend Batches;
  EpochLoops() = default;

  void check(const State& state) {
    TORCH_CHECK(state.epoch >= 0 && state.epoch < std::numeric_limits<std::int64_t>::max(), name(),
                ": a state must have an epoch >= 0 that another can follow, got ", state.epoch);
    const auto size = batches().size_of(state.epoch);
    TORCH_CHECK(state.batch >= 0 && state.batch <= size, name(), ": a state must have an epoch and a batch of 0 to ",
                size, ", got ", state.epoch, " and ", state.batch);
  }
  std::string fingerprint(const State& at) {
    if (batches().size_of(at.epoch) == 0) return "none";
    return fingerprint_of(batches().batch_at({at.epoch, std::max<std::int64_t>(at.batch - 1, 0)}));
  }
  Batches& batches() { return static_cast<Batches&>(*this); }
  std::string name() { return type_name(batches()); }

  bool next(Batch& batch) {
    if (state_.batch == batches().size_of(state_.epoch)) {
      state_ = {state_.epoch + 1, 0};
      return false;
    }
    batch = batches().batch_at(state_);
    ++state_.batch;
    return true;
  }

  State state_;
  std::int64_t count_ = 0;  // of loops begun
  bool resumed_ = false;
};

}  // namespace gradaccum::detail
