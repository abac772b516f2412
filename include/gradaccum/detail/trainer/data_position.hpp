// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/trainer/any_batches.hpp>
#include <gradaccum/fit_options.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace gradaccum::detail {

/// Where a `fit` is in its batches, and how another comes back there.
///
/// Batches with a `state(Archive&)` do it themselves. Any other range is gone through again: from the random numbers
/// that its epoch began with, and without training, as far as the state; there the random numbers are those of the
/// state, and the last batch must be the same as then.
class DataPosition {
 public:
  void hold(AnyBatches& batches);
  /// Random numbers are never left at the beginning of an epoch that was to be gone through again.
  void let_go();

  bool goes_through(const AnyBatches& batches) const { return batches_ && batches_->address() == batches.address(); }

  void begin_epoch();
  /// The batch in hand: while it is there, a state can say which it was.
  void see(const AnyBatch& batch);
  void forget() { batch_ = nullptr; }
  /// All batches of the epoch have been taken.
  void exhaust();
  void end_epoch();

  /// The state that was loaded is of the middle of an epoch.
  bool is_in_epoch() const { return resumes_; }
  /// The same, asked once: the epoch goes on.
  bool resumes() { return std::exchange(resumes_, false); }
  /// All batches of the epoch have been taken; what is left of it is its tail.
  bool exhausted() const { return exhausted_; }
  /// This batch was trained with before the state was saved.
  bool skips(const AnyBatch& batch);

  void state(Archive& archive);

 private:
  bool batches_have_state() const { return batches_ && batches_->has_state(); }

  AnyBatches* batches_ = nullptr;
  const AnyBatch* batch_ = nullptr;
  std::string expected_;  // the fingerprint of the last batch that is skipped
  Archive::Tensors epoch_begin_, after_skipping_;
  std::int64_t taken_ = 0, to_skip_ = 0;
  bool resumes_ = false, exhausted_ = false;
};

/// Holds the batches of a fit while it runs.
class DataScope {
 public:
  DataScope(DataPosition& position, AnyBatches& batches) : position_(position) { position.hold(batches); }
  DataScope(const DataScope&) = delete;
  DataScope& operator=(const DataScope&) = delete;
  ~DataScope() { position_.let_go(); }

 private:
  DataPosition& position_;
};

/// The place in a fit, with which only another fit goes on.
void archive_fit(Archive& archive, FitStatus& status, DataPosition& data);

/// The epoch that a saved fit was in the middle of.
std::optional<std::int64_t> epoch_in_hand(const Archive& archive);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/data_position.ipp>
#endif
