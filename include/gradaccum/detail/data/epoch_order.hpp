// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>

#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// Returns a generator for an epoch, which depends on the seed and the epoch alone.
at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch);

/// This rank's share of an epoch's batches: every `world_size`-th, from the `rank`-th on.
struct ShareOfRank {
  std::int64_t rank = 0, world_size = 1;

  void check(const char* owner) const;
  std::int64_t of(std::int64_t batches) const { return (batches - rank + world_size - 1) / world_size; }
  std::int64_t nth(std::int64_t own) const { return own * world_size + rank; }
};

/// The position of a loop over batches, which can be saved and resumed. One loop runs at a time, and each is an epoch.
class EpochOrder {
 public:
  /// A position from which a run continues with the same batches.
  struct State {
    std::int64_t epoch = 0;  ///< epoch of the current loop, or of the next one
    std::int64_t batch = 0;  ///< next batch of that epoch
    bool operator==(const State&) const = default;
  };

  const State& state() const { return state_; }
  /// Makes the next loop start from `state`.
  void load_state(const State& state);
  /// Saves or loads the position. Other data is an error, detected by its number of batches and its last batch.
  void state(Archive& archive);

  /// A position, and whether the next loop resumes there. `Prefetch` restores it after reading ahead.
  struct Place {
    State state;
    bool resumed = false;
  };
  Place place() const { return {state_, resumed_}; }
  /// Returns to a place that this object gave.
  void go_back(const Place& place);

 protected:
  EpochOrder() = default;
  EpochOrder(const EpochOrder&) = default;
  EpochOrder& operator=(const EpochOrder&) = default;
  virtual ~EpochOrder() = default;

  /// Begins a loop, and returns its number.
  std::int64_t begin_loop();
  void check_is_last(std::int64_t loop) const;
  /// Returns the number of the next batch, among all ranks'. At an epoch's end, returns nothing and begins the next.
  std::optional<std::int64_t> next();
  void taken() { ++state_.batch; }

  virtual std::int64_t all_of(std::int64_t epoch) const = 0;  ///< the number of batches of all ranks
  virtual ShareOfRank share() const = 0;
  virtual std::string fingerprint_at(std::int64_t epoch, std::int64_t number) const = 0;

 private:
  void check(const State& state) const;
  std::string fingerprint(const State& at) const;
  /// The number of this rank's batches.
  std::int64_t size_of(std::int64_t epoch) const { return share().of(all_of(epoch)); }
  std::string name() const;

  State state_;
  std::int64_t count_ = 0;  // number of loops begun
  bool resumed_ = false;
};

/// A range of batches in the order of an `EpochOrder`.
template <class Batch>
class EpochLoops : public EpochOrder {
 public:
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(EpochLoops& loops) : loops_(&loops), loop_(loops.begin_loop()) { ++*this; }
    Batch& operator*() const { return batch_; }
    Batch* operator->() const { return &batch_; }
    Iterator& operator++() {
      loops_->check_is_last(loop_);
      if (const auto number = loops_->next()) {
        batch_ = loops_->batch_at(loops_->state().epoch, *number);
        loops_->taken();
      } else {
        loops_ = nullptr;
      }
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return loops_ == nullptr; }

   private:
    EpochLoops* loops_;
    std::int64_t loop_;
    mutable Batch batch_;  // operator* is const, and returns a Batch&
  };

  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  virtual Batch batch_at(std::int64_t epoch, std::int64_t number) const = 0;
  std::string fingerprint_at(std::int64_t epoch, std::int64_t number) const override {
    return fingerprint_of(batch_at(epoch, number));
  }
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/epoch_order.ipp>
#endif
