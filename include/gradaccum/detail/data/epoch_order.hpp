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

/// The random numbers of an epoch: they depend on the seed and the epoch alone.
at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch);

/// Which of an epoch's batches are this rank's: every `world_size`-th, from the `rank`-th on.
struct ShareOfRank {
  std::int64_t rank = 0, world_size = 1;

  void check(const char* owner) const;
  std::int64_t of(std::int64_t batches) const { return (batches - rank + world_size - 1) / world_size; }
  std::int64_t nth(std::int64_t own) const { return own * world_size + rank; }
};

/// Where a loop over batches is, whatever they are: one loop at a time, an epoch a loop, a state to go on from.
class EpochOrder {
 public:
  /// Where a run is: enough to go on from there with the same batches.
  struct State {
    std::int64_t epoch = 0;  ///< of the loop that runs, or of the next one
    std::int64_t batch = 0;  ///< the next one in it
    bool operator==(const State&) const = default;
  };

  const State& state() const { return state_; }
  /// The next loop goes on from here.
  void load_state(const State& state);
  /// Saves or loads where a run is. Other data is an error, known by its number of batches and by the last batch.
  void state(Archive& archive);

  /// Where it is, and whether the next loop goes on there: what a `Prefetch` that went ahead puts back.
  struct Place {
    State state;
    bool resumed = false;
  };
  Place place() const { return {state_, resumed_}; }
  /// To a place of this object's own.
  void go_back(const Place& place);

 protected:
  EpochOrder() = default;
  EpochOrder(const EpochOrder&) = default;
  EpochOrder& operator=(const EpochOrder&) = default;
  virtual ~EpochOrder() = default;

  /// A new loop, and its number.
  std::int64_t begin_loop();
  void check_is_last(std::int64_t loop) const;
  /// The number of the next batch, of all ranks'; none where the epoch is over, and then the next one begins.
  std::optional<std::int64_t> next();
  void taken() { ++state_.batch; }

  virtual std::int64_t all_of(std::int64_t epoch) const = 0;  ///< the number of batches of all ranks
  virtual ShareOfRank share() const = 0;
  virtual std::string fingerprint_at(std::int64_t epoch, std::int64_t number) const = 0;

 private:
  void check(const State& state) const;
  std::string fingerprint(const State& at) const;
  /// This rank's.
  std::int64_t size_of(std::int64_t epoch) const { return share().of(all_of(epoch)); }
  std::string name() const;

  State state_;
  std::int64_t count_ = 0;  // of loops begun
  bool resumed_ = false;
};

/// Loops over batches in that order.
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
    mutable Batch batch_;  // an input iterator gives what it holds, whether it is const or not
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
