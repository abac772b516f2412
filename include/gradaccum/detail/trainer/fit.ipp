// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/fit.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/fit_scope.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/training_state.hpp>

#include <c10/util/Exception.h>

#include <exception>
#include <optional>

namespace gradaccum::detail {

GRADACCUM_INLINE Fit::Fit(TrainerBase& trainer, AnyBatches& batches)
    : trainer_(trainer), parts_(*trainer.parts_), batches_(batches) {}

GRADACCUM_INLINE FitReport Fit::run(const FitOptions& options) {
  const auto peers = trainer_.peers();
  TORCH_CHECK(!peers || !peers->take_each_backward() || options.tail == Tail::flush,
              "FitOptions: tail must be flush with Shard::gradients: others have the gradients of a window that is "
              "open, and it can neither be dropped nor saved");
  const FitScope scope(trainer_.module(), trainer_.device(), parts_.status,
                       {.options = options, .batches = batches_.number()});
  const DataScope holding(parts_.data, batches_);
  std::optional<FitReport> report;
  parts_.policies.in_scopes(&AnyPolicy::in_fit_scope, [&] {
    trainer_.or_discard([&] {
      resume();
      or_give_up([&] {
        stop_at_limits();
        // one that was done may have its epoch to end
        while (!parts_.status.done() || parts_.data.is_in_epoch()) run_epoch();
      });
      report = scope.report();
    });
  });
  return *report;
}

GRADACCUM_INLINE void Fit::or_give_up(c10::function_ref<void()> work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (const auto peers = trainer_.peers()) peers->give_up(error.what());
    throw;
  }
}

GRADACCUM_INLINE void Fit::resume() {
  auto& status = parts_.status;
  const auto& from = status.options.resume;
  const auto* const peers = trainer_.peers().get();
  const auto folder = of_rank_0(peers, [&] { return from.newest(); });
  if (folder.empty()) return;
  auto archive = from.open(folder, status.options.allow_changes, peers);
  status.resumed_from = folder.string();
  if (const auto epoch = epoch_in_hand(archive)) begin_epoch(*epoch);
  load_state(archive, trainer_);
}

GRADACCUM_INLINE void Fit::begin_epoch(std::int64_t epoch) {
  parts_.status.epoch = epoch;
  parts_.data.begin_epoch();
  parts_.policies.all(&AnyPolicy::on_epoch_begin, epoch);
}

/// Not in the middle of a window.
GRADACCUM_INLINE void Fit::stop_at_limits() {
  if (parts_.record.so_far().micro_batches == 0) parts_.status.stop_at_limits();
}

/// Policies hear of what was found, and may end the training, before one of them saves it.
GRADACCUM_INLINE void Fit::at_boundary() {
  stop_at_limits();
  parts_.policies.all(&AnyPolicy::before_boundary);
  parts_.policies.all(&AnyPolicy::at_boundary);
}

GRADACCUM_INLINE void Fit::run_epoch() {
  auto& status = parts_.status;
  auto& data = parts_.data;
  if (!data.resumes()) begin_epoch(parts_.counts.epochs++);
  if (!data.exhausted() && !status.done()) run_batches();
  if (!interrupted() && (status.options.tail == Tail::flush || status.options.smoke)) {
    trainer_.flush();
    at_boundary();
  }
  if (interrupted()) return;
  if (status.options.tail == Tail::drop) trainer_.discard();
  go_along();
  if (interrupted()) return;
  status.end_epoch(parts_.window.has_weight());
  data.end_epoch();
  for (const auto place : parts_.policies.processes_first()) parts_.policies[place].on_epoch_end(status.epoch);
  parts_.policies.others_continue();  // none do: what somebody wanted since, to stop say, is known to all now
  at_boundary();
}

GRADACCUM_INLINE void Fit::go_along() {
  while (!interrupted()) {
    const bool continues = parts_.policies.others_continue();
    if (continues) trainer_.flush();  // with theirs
    if (continues || interrupted()) at_boundary();
    if (!continues) return;
  }
}

GRADACCUM_INLINE void Fit::run_batches() {
  const bool all = batches_.for_each([&](const AnyBatch& batch) {
    if (parts_.data.skips(batch)) return true;
    parts_.data.see(batch);
    trainer_.step_with(batch);
    at_boundary();
    parts_.data.forget();
    return !parts_.status.done();
  });
  if (all) parts_.data.exhaust();
}

}  // namespace gradaccum::detail
