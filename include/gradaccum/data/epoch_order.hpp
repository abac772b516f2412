// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: data

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/loops.hpp>
#include <gradaccum/detail/data/samples.hpp>

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

namespace gradaccum::data {

/// The position of a loop over batches, which can be saved and resumed: the base of the classes that keep their batches
/// in memory. One loop runs at a time, and each is an epoch.
///
///     ga::data::TensorBatches batches(x, y, {.batch_size = 2}), later = batches;
///     for (auto& batch : batches)
///       if (batches.state().batch == 3) break;
///     later.load_state(batches.state());
///     for (auto& batch : later) std::cout << batch.data << '\n';  // from the fourth batch on
class EpochOrder {
 public:
  /// A position from which a run continues with the same batches.
  struct State {
    std::int64_t epoch = 0;  ///< epoch of the current loop, or of the next one
    std::int64_t batch = 0;  ///< next batch of that epoch
    bool operator==(const State&) const = default;
  };

  const State& state() const { return place_.state; }
  /// Returns the number of this rank's batches in the current epoch, or the next one. Shuffled epochs of
  /// `LengthBuckets` with `tokens` may differ.
  std::int64_t size() const { return size_of(place_.state.epoch); }
  /// Returns the maximum over ranks of the batches in an epoch, counted from the current or next one.
  std::int64_t most_batches(std::int64_t epochs_ahead) const {
    return detail::ShareOfRank{0, share().world_size}.of(all_of(place_.state.epoch + epochs_ahead));
  }
  /// Makes the next loop start from `state`.
  void load_state(const State& state);
  /// Saves or loads the position. Throws if the data differs in the number of batches or the last batch.
  void state(Archive& archive);

  /// A position, and whether the next loop resumes there. `Prefetch` restores it after reading ahead.
  struct Place {
    State state;
    bool resumed = false;
  };
  Place place() const { return place_; }
  /// Returns to a result of place().
  void go_back(const Place& place) { place_ = place; }

 protected:
  virtual ~EpochOrder() = default;

  /// Begins a loop, and returns its number.
  std::int64_t begin_loop();
  /// Returns the index of the loop's next batch among all ranks' batches. At an epoch's end, returns nullopt and begins
  /// the next. Throws if another loop has begun since.
  std::optional<std::int64_t> next(std::int64_t loop);
  void count_batch() { ++place_.state.batch; }

  virtual std::int64_t all_of(std::int64_t epoch) const = 0;  ///< the number of batches of all ranks
  virtual detail::ShareOfRank share() const = 0;
  virtual std::string fingerprint_at(std::int64_t epoch, std::int64_t number) const = 0;

 private:
  void check(const State& state) const;
  State dealt_anew(const Archive& archive) const;
  std::int64_t size_of(std::int64_t epoch) const { return share().of(all_of(epoch)); }

  Place place_;
  std::int64_t count_ = 0;  // number of loops begun
};

/// A range of batches in the order of an `EpochOrder`. Each `begin()` starts a loop.
template <class Batch>
class EpochLoops : public EpochOrder {
  struct Loop {
    EpochLoops* loops;
    std::int64_t number;
    Batch in_hand = {};

    Batch& batch() { return in_hand; }
    bool next() {
      const auto of_all = loops->next(number);
      if (!of_all) return false;
      in_hand = loops->batch_at(loops->state().epoch, *of_all);
      loops->count_batch();
      return true;
    }
  };
  using Iterator = detail::BatchIterator<Batch, Loop>;

 public:
  Iterator begin() { return Iterator({this, begin_loop()}); }
  std::default_sentinel_t end() const { return {}; }

 private:
  virtual Batch batch_at(std::int64_t epoch, std::int64_t number) const = 0;
  std::string fingerprint_at(std::int64_t epoch, std::int64_t number) const override {
    return detail::fingerprint_of(batch_at(epoch, number));
  }
};

}  // namespace gradaccum::data

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/epoch_order.ipp>
#endif
