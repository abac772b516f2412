// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/state/generator_states.hpp>
#include <gradaccum/fit_options.hpp>

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace gradaccum::detail {

/// Where a `fit` is in its batches, and how another comes back there.
///
/// Batches with a `state(Archive&)` do it themselves. Any other range is gone through again: from the random numbers
/// that its epoch began with, and without training, as far as the state; there the random numbers are those of the
/// state, and the last batch must be the same as then.
class DataPosition {
 public:
  template <class Batches>
  void hold(Batches& batches) {
    *this = {};
    if constexpr (requires(Archive & archive) { batches.state(archive); })
      state_of_batches_ = [&batches](Archive& archive) { archive("batches", batches); };
  }
  /// Random numbers are never left at the beginning of an epoch that was to be gone through again.
  void let_go() {
    if (to_skip_ > 0) set_generators(after_skipping_);
    *this = {};
  }

  void begin_epoch() {
    if (!state_of_batches_) epoch_begin_ = states_of_generators();
  }
  /// The batch in hand: while it is there, a state can say which it was.
  template <class Batch>
  void see(const Batch& batch) {
    taken_ += 1;
    if (!state_of_batches_) fingerprint_ = [&batch] { return fingerprint_of(batch); };
  }
  void forget() { fingerprint_ = {}; }
  /// All batches of the epoch have been taken.
  void exhaust() {
    TORCH_CHECK(to_skip_ == 0, "Trainer: the data has changed: the state was saved after batch ", taken_ + to_skip_,
                " of an epoch, which now has ", taken_, "; give it the same data, or start afresh");
    exhausted_ = true;
  }
  void end_epoch() {
    exhausted_ = false;
    taken_ = 0;
  }

  /// The state that was loaded is of the middle of an epoch.
  bool is_in_epoch() const { return resumes_; }
  /// The same, asked once: the epoch goes on.
  bool resumes() { return std::exchange(resumes_, false); }
  /// All batches of the epoch have been taken; what is left of it is its tail.
  bool exhausted() const { return exhausted_; }
  /// This batch was trained with before the state was saved.
  template <class Batch>
  bool skips(const Batch& batch) {
    if (to_skip_ == 0) return false;
    ++taken_;
    if (--to_skip_ > 0) return true;
    TORCH_CHECK(expected_.empty() || expected_ == fingerprint_of(batch), "Trainer: the data has changed: batch ",
                taken_ - 1,
                " (counted from 0) of the epoch is not the one that the state was saved after; give it the "
                "same data in the same order, or go on all the same by {.allow_changes = true}");
    set_generators(after_skipping_);
    return true;
  }

  void state(Archive& archive);

 private:
  struct Generators {
    Archive::Tensors& states;
    void state(Archive& archive) { archive.tensors(states); }
  };

  std::function<void(Archive&)> state_of_batches_;
  std::function<std::string()> fingerprint_;
  std::string expected_;  // of the last batch that is skipped
  Archive::Tensors epoch_begin_, after_skipping_;
  std::int64_t taken_ = 0, to_skip_ = 0;
  bool resumes_ = false, exhausted_ = false;
};

/// Holds the batches of a fit while it runs.
class DataScope {
 public:
  template <class Batches>
  DataScope(DataPosition& position, Batches& batches) : position_(position) {
    position.hold(batches);
  }
  DataScope(const DataScope&) = delete;
  DataScope& operator=(const DataScope&) = delete;
  ~DataScope() { position_.let_go(); }

 private:
  DataPosition& position_;
};

/// The place in a fit, with which only another fit goes on.
inline void archive_fit(Archive& archive, FitStatus& status, DataPosition& data) {
  if (!status.running || (archive.loading() && !archive.has("fit"))) {
    archive.leave_out("fit");
    return archive.leave_out("data");
  }
  archive("fit", status);
  archive("data", data);
}

/// The epoch that a saved fit was in the middle of.
inline std::optional<std::int64_t> epoch_in_hand(const Archive& archive) {
  const auto value = [&]<class T>(const char* name, T otherwise) {
    const auto found = archive.values().find(name);
    const auto* const held = found == archive.values().end() ? nullptr : std::get_if<T>(&found->second);
    return held ? *held : otherwise;
  };
  if (value("data.taken", std::int64_t{0}) == 0 && !value("data.exhausted", false)) return {};
  return value("fit.epoch", std::int64_t{0});
}

inline void DataPosition::state(Archive& archive) {
  auto taken = taken_;
  auto exhausted = exhausted_;
  auto fingerprint = fingerprint_ ? fingerprint_() : "";
  auto epoch_begin = epoch_begin_;
  archive("taken", taken);
  archive("exhausted", exhausted);
  if (state_of_batches_) {
    state_of_batches_(archive);
  } else {
    archive("last_batch", fingerprint);
    archive("epoch_begin", Generators{epoch_begin});
  }
  if (!archive.loading()) return;
  TORCH_CHECK(taken >= 0, "Trainer: a state must have taken >= 0 batches, got ", taken);
  for (auto& [name, state] : epoch_begin) state = state.clone();  // outlives what it was loaded from
  const bool again = !state_of_batches_ && taken > 0 && !exhausted;
  if (again) check_generators(epoch_begin, archive.changes_allowed());
  if (archive.changes_allowed()) fingerprint.clear();
  archive.when_all_fit([=, this] {
    resumes_ = taken > 0 || exhausted;
    exhausted_ = exhausted;
    taken_ = again ? 0 : taken;
    to_skip_ = again ? taken : 0;
    expected_ = fingerprint;
    epoch_begin_ = epoch_begin;
    if (!again) return;
    after_skipping_ = states_of_generators();
    set_generators(epoch_begin);
  });
}

}  // namespace gradaccum::detail
