// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/accumulate.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <iterator>
#include <string>

namespace gradaccum {

GRADACCUM_INLINE void Accumulate::attach(TrainerBase& trainer) {
  check();
  trainer.set_accumulate_in(accumulate_in);
  trainer.set_batch_size(batch_size);
  window = &trainer.window();
}

GRADACCUM_INLINE void Accumulate::state(Archive& archive) const {
  std::string by_epoch;
  for (auto [epoch, number] : schedule) by_epoch += c10::str(epoch, ":", number, " ");
  archive.setting("steps", std::int64_t(steps));
  archive.setting("schedule", by_epoch);
  archive.setting("batch_size", std::int64_t(batch_size));
}

GRADACCUM_INLINE std::int64_t Accumulate::steps_in(std::int64_t epoch) const {
  const auto next = schedule.upper_bound(epoch);
  return next == schedule.begin() ? std::int64_t(steps) : std::prev(next)->second;
}

GRADACCUM_INLINE void Accumulate::check() const {
  TORCH_CHECK(steps >= 1, "Accumulate: steps must be >= 1, got ", steps);
  TORCH_CHECK(batch_size >= 0, "Accumulate: batch_size must be >= 1, got ", batch_size);
  TORCH_CHECK(batch_size == 0 || (steps == 1 && schedule.empty()),
              "Accumulate: batch_size says when a window is full, and so do steps and schedule; give one of them");
  for (auto [epoch, number] : schedule)
    TORCH_CHECK(epoch >= 0 && number >= 1, "Accumulate: schedule must have epochs >= 0 and steps >= 1, got {", epoch,
                ", ", number, "}");
}

}  // namespace gradaccum
