// SPDX-License-Identifier: Apache-2.0
// Decides how many micro-batches a window has.
#pragma once

#include <gradaccum/policies/accumulate.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <iterator>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

struct AccumulateRun {
  static constexpr std::string_view name = Accumulate::name;

  const Accumulate& options;
  const Step& window;  // the trainer's current one

  bool ready() const {
    if (options.batch_size > 0) return window.samples >= options.batch_size;
    return window.batches >= steps_in(window.epoch);
  }

  std::int64_t steps_in(std::int64_t epoch) const {
    const auto next = options.schedule.upper_bound(epoch);
    return next == options.schedule.begin() ? std::int64_t(options.steps) : std::prev(next)->second;
  }

  /// Requires the same values in a resumed training.
  void state(Archive& archive) const {
    std::string by_epoch;
    for (auto [epoch, number] : options.schedule) by_epoch += fmt::format("{}:{} ", epoch, number);
    archive.setting("steps", std::int64_t(options.steps));
    archive.setting("schedule", by_epoch);
    archive.setting("batch_size", std::int64_t(options.batch_size));
  }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> Accumulate::start(TrainerBase& trainer) {
  TORCH_CHECK(steps >= 1, "Accumulate: steps must be >= 1, got ", steps);
  TORCH_CHECK(batch_size >= 0, "Accumulate: batch_size must be >= 1, or 0 to use steps, got ", batch_size);
  TORCH_CHECK(batch_size == 0 || (steps == 1 && schedule.empty()),
              "Accumulate: batch_size must come without steps and schedule, which also say when a window is full");
  for (auto [epoch, number] : schedule)
    TORCH_CHECK(epoch >= 0 && number >= 1, "Accumulate: schedule must have epochs >= 0 and steps >= 1, got {", epoch,
                ", ", number, "}");
  const auto run = detail::started<detail::AccumulateRun>(*this, trainer.window());
  if (accumulate_in) trainer.set_accumulate_in(accumulate_in);
  if (batch_size > 0)
    trainer.set_batch_size(batch_size);
  else
    trainer.set_micro_batches_per_window([&run = run->policy](std::int64_t epoch) { return run.steps_in(epoch); });
  return run;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
