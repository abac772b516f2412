// SPDX-License-Identifier: Apache-2.0
// Decides how many micro-batches a window has.
#pragma once

#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>

#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <iterator>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void Accumulate::attach(TrainerBase& trainer) {
  TORCH_CHECK(steps >= 1, "Accumulate: steps must be >= 1, got ", steps);
  TORCH_CHECK(batch_size >= 0, "Accumulate: batch_size must be >= 1, or 0 to use steps, got ", batch_size);
  TORCH_CHECK(batch_size == 0 || (steps == 1 && schedule.empty()),
              "Accumulate: batch_size must come without steps and schedule, which also say when a window is full");
  for (auto [epoch, number] : schedule)
    TORCH_CHECK(epoch >= 0 && number >= 1, "Accumulate: schedule must have epochs >= 0 and steps >= 1, got {", epoch,
                ", ", number, "}");
  trainer.set_accumulate_in(accumulate_in);
  trainer.set_batch_size(batch_size);
  if (batch_size == 0) trainer.loop().steps_in = [this](std::int64_t epoch) { return steps_in(epoch); };
  window = &trainer.window();
}

GRADACCUM_INLINE void Accumulate::state(Archive& archive) const {
  std::string by_epoch;
  for (auto [epoch, number] : schedule) by_epoch += fmt::format("{}:{} ", epoch, number);
  archive.setting("steps", std::int64_t(steps));
  archive.setting("schedule", by_epoch);
  archive.setting("batch_size", std::int64_t(batch_size));
}

GRADACCUM_INLINE std::int64_t Accumulate::steps_in(std::int64_t epoch) const {
  const auto next = schedule.upper_bound(epoch);
  return next == schedule.begin() ? std::int64_t(steps) : std::prev(next)->second;
}

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<Accumulate>;
template class PolicyOf<OptimizerInBackward>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
