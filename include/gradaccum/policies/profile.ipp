// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/profile.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/profiled_updates.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/trainer_base.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <exception>

namespace gradaccum {

struct Profile::Run {
  const TrainerBase& trainer;
  detail::ProfiledUpdates updates;
};

GRADACCUM_INLINE const ProfileReport* Profile::report() const {
  return run && run->updates.report() ? &*run->updates.report() : nullptr;
}

GRADACCUM_INLINE void Profile::attach(TrainerBase& trainer) {
  TORCH_CHECK(updates.first >= 0, "Profile: updates must be >= 0, got {", updates.first, ", ", updates.second, "}");
  TORCH_CHECK(updates.first < updates.second, "Profile: updates must be {from, to} with from < to, got {",
              updates.first, ", ", updates.second, "}");
  TORCH_CHECK(!directory.empty(), "Profile: directory must be given");
  run = trainer.is_first() ? std::shared_ptr<Run>(new Run{trainer, {trainer, updates, directory}}) : nullptr;
}

/// Ends what an exception has left at work. Other processes do not know that rank 0 does not begin.
GRADACCUM_INLINE std::shared_ptr<void> Profile::fit_scope() {
  if (!run) return nullptr;
  try {
    run->updates.prepare();
  } catch (const std::exception& error) {
    if (const auto peers = run->trainer.peers()) peers->give_up(error.what());
    throw;
  }
  return {nullptr, [run = run](void*) { run->updates.abandon(); }};
}

/// In the middle of an epoch, and before the state is loaded, where a `fit` goes on from one.
GRADACCUM_INLINE void Profile::on_epoch_begin(std::int64_t) {
  if (run && run->trainer.status().resumed_from.empty()) run->updates.begin("data");
}

/// Not that of an evaluation.
GRADACCUM_INLINE int Profile::forward_scope() {
  if (run && at::GradMode::is_enabled()) run->updates.begin("forward", /*micro_batches=*/1);
  return 0;
}

GRADACCUM_INLINE void Profile::before_backward(Loss&) {
  if (run) run->updates.enter("backward");
}

/// Comes before the backward pass where that takes the steps.
GRADACCUM_INLINE void Profile::before_close() {
  if (run && !run->trainer.steps_in_backward()) run->updates.enter("reduce");
}

GRADACCUM_INLINE void Profile::after_backward(Gradients&) {
  if (run) run->updates.enter(run->trainer.closing() ? "reduce" : "other");
}

GRADACCUM_INLINE void Profile::before_step(Gradients&) {
  if (run) run->updates.enter("step");
}

GRADACCUM_INLINE void Profile::after_window(const Step&) {
  if (run) run->updates.enter("other");
}

GRADACCUM_INLINE void Profile::at_boundary() {
  if (run) run->updates.at_boundary();
}

}  // namespace gradaccum
