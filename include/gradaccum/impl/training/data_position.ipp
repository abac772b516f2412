// SPDX-License-Identifier: Apache-2.0
// Saves the position of a fit in its batches, and finds it again.
#pragma once

#include <gradaccum/detail/training/data_position.hpp>

#include <gradaccum/metrics.hpp>

#include <c10/util/Exception.h>

#include <algorithm>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool DataPosition::skips(const AnyBatch& batch) {
  if (to_skip_ == 0) return false;
  ++taken_;
  if (--to_skip_ > 0) return true;
  TORCH_CHECK(expected_.empty() || expected_ == batch.fingerprint(), "Trainer: the data has changed: batch ",
              taken_ - 1,
              " (counted from 0) of the epoch is not the one that the state was saved after; use the same data in the "
              "same order, or continue anyway with {.allow_changes = true}");
  set_generators(after_skipping_);
  return true;
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
    archive("epoch_begin", OwnTensors{epoch_begin});
  }
  if (!archive.loading()) return;
  if (archive.ranks().are_others()) {
    taken = std::ranges::max(archive.of_ranks<std::int64_t>("taken"));
    const auto ends = archive.of_ranks<bool>("exhausted");
    exhausted = std::ranges::find(ends, false) == ends.end();
    TORCH_CHECK(by_batches || taken == 0 || exhausted, "Trainer: the state was saved in the middle of an epoch, by ",
                archive.ranks().saved,
                " rank(s), and batches without a state(ga::Archive&) do not tell another number of ranks which of them "
                "are left; resume with as many until the epoch ends, or use TensorBatches or LengthBuckets");
  }
  TORCH_CHECK(taken >= 0, "Trainer: a state must have taken >= 0 batches, got ", taken);
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

#undef GRADACCUM_INLINE
