// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/data_position.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/generator_states.hpp>

#include <c10/util/Exception.h>

#include <variant>

namespace gradaccum::detail {

GRADACCUM_INLINE void DataPosition::hold(AnyBatches& batches) {
  *this = {};
  batches_ = &batches;
}

GRADACCUM_INLINE void DataPosition::let_go() {
  if (to_skip_ > 0) set_generators(after_skipping_);
  *this = {};
}

GRADACCUM_INLINE void DataPosition::begin_epoch() {
  if (!batches_have_state()) epoch_begin_ = states_of_generators();
}

GRADACCUM_INLINE void DataPosition::see(const AnyBatch& batch) {
  taken_ += 1;
  if (!batches_have_state()) batch_ = &batch;
}

GRADACCUM_INLINE void DataPosition::exhaust() {
  TORCH_CHECK(to_skip_ == 0, "Trainer: the data has changed: the state was saved after batch ", taken_ + to_skip_,
              " of an epoch, which now has ", taken_, "; give it the same data, or start afresh");
  exhausted_ = true;
}

GRADACCUM_INLINE void DataPosition::end_epoch() {
  exhausted_ = false;
  taken_ = 0;
}

GRADACCUM_INLINE bool DataPosition::skips(const AnyBatch& batch) {
  if (to_skip_ == 0) return false;
  ++taken_;
  if (--to_skip_ > 0) return true;
  TORCH_CHECK(expected_.empty() || expected_ == batch.fingerprint(), "Trainer: the data has changed: batch ",
              taken_ - 1,
              " (counted from 0) of the epoch is not the one that the state was saved after; give it the "
              "same data in the same order, or go on all the same by {.allow_changes = true}");
  set_generators(after_skipping_);
  return true;
}

GRADACCUM_INLINE void archive_fit(Archive& archive, FitStatus& status, DataPosition& data) {
  if (!status.running || (archive.loading() && !archive.has("fit"))) {
    archive.leave_out("fit");
    return archive.leave_out("data");
  }
  archive("fit", status);
  archive("data", data);
}

GRADACCUM_INLINE std::optional<std::int64_t> epoch_in_hand(const Archive& archive) {
  const auto value = [&]<class T>(const char* name, T otherwise) {
    const auto found = archive.values().find(name);
    const auto* const held = found == archive.values().end() ? nullptr : std::get_if<T>(&found->second);
    return held ? *held : otherwise;
  };
  if (value("data.taken", std::int64_t{0}) == 0 && !value("data.exhausted", false)) return {};
  return value("fit.epoch", std::int64_t{0});
}

/// As a part of a state: tensors under the names of the generators.
struct ArchivedGenerators {
  Archive::Tensors& states;
  void state(Archive& archive) { archive.tensors(states); }
};

GRADACCUM_INLINE void DataPosition::state(Archive& archive) {
  const bool by_batches = batches_have_state();
  auto taken = taken_;
  auto exhausted = exhausted_;
  auto fingerprint = batch_ ? batch_->fingerprint() : std::string();
  auto epoch_begin = epoch_begin_;
  archive("taken", taken);
  archive("exhausted", exhausted);
  if (by_batches) {
    batches_->state(archive);
  } else {
    archive("last_batch", fingerprint);
    archive("epoch_begin", ArchivedGenerators{epoch_begin});
  }
  if (!archive.loading()) return;
  TORCH_CHECK(taken >= 0, "Trainer: a state must have taken >= 0 batches, got ", taken);
  for (auto& [name, state] : epoch_begin) state = state.clone();  // outlives what it was loaded from
  const bool again = !by_batches && taken > 0 && !exhausted;
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
