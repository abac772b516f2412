// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/training/any_batch.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace gradaccum::detail {

/// The position of a `fit` in its batches, which can be saved and restored.
///
/// Batches with a `state(Archive&)` restore their position themselves. Any other range is iterated again without
/// training, with the random state of its epoch's start, up to the saved batch, which must have the same fingerprint.
/// Then the saved random state is restored.
class DataPosition {
 public:
  void hold(AnyBatches& batches) {
    *this = {};
    batches_ = &batches;
  }
  /// Restores the saved random state if an exception ended the repeated iteration.
  void let_go() {
    if (to_skip_ > 0) set_generators(after_skipping_);
    *this = {};
  }

  /// Returns `AnyBatches::most_batches`, counted from the current epoch.
  std::optional<std::int64_t> most_batches(std::int64_t epochs_ahead, bool alone) const {
    return batches_->most_batches(epochs_ahead - exhausted_, alone);
  }
  bool goes_through(const AnyBatches& batches) const { return batches_ && batches_->address() == batches.address(); }

  void begin_epoch() {
    if (!batches_have_state()) epoch_begin_ = states_of_generators();
  }
  /// Counts the batch. Batches without a state are also kept until forget(), so that a state can have a fingerprint.
  void see(const AnyBatch& batch) {
    taken_ += 1;
    if (!batches_have_state()) batch_ = &batch;
  }
  void forget() { batch_ = nullptr; }
  /// Notes that all batches of the epoch have been drawn.
  void exhaust() {
    TORCH_CHECK(to_skip_ == 0, "Trainer: the data has changed: the state was saved after batch ", taken_ + to_skip_,
                " of an epoch, which now has only ", taken_, "; resume with the same data, or start a new run");
    exhausted_ = true;
  }
  void end_epoch() {
    exhausted_ = false;
    taken_ = 0;
  }

  /// Returns true if the loaded state was saved in the middle of an epoch.
  bool is_in_epoch() const { return resumes_; }
  /// Returns is_in_epoch(), and resets it: the epoch continues.
  bool resumes() { return std::exchange(resumes_, false); }
  /// Returns true if all batches of the epoch have been drawn, so that only its tail is left.
  bool exhausted() const { return exhausted_; }
  /// Returns true if training used this batch before the state was saved.
  bool skips(const AnyBatch& batch);

  void state(Archive& archive);

 private:
  bool batches_have_state() const { return batches_ && batches_->has_state(); }

  AnyBatches* batches_ = nullptr;
  const AnyBatch* batch_ = nullptr;
  std::string expected_;  // the fingerprint of the last skipped batch
  Archive::Tensors epoch_begin_, after_skipping_;
  std::int64_t taken_ = 0, to_skip_ = 0;
  bool resumes_ = false, exhausted_ = false;
};

/// Returns the epoch that a state was saved in the middle of.
std::optional<std::int64_t> epoch_in_hand(const Archive& archive);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/training/data_position.ipp>
#endif
