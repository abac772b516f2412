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

GRADACCUM_INLINE detail::ProfileScope::~ProfileScope() {
  if (updates_) updates_->abandon();
}

GRADACCUM_INLINE const ProfileReport* Profile::report() const {
  return at_work && at_work->report() ? &*at_work->report() : nullptr;
}

GRADACCUM_INLINE void Profile::attach(TrainerBase& its_trainer) {
  TORCH_CHECK(updates.first >= 0, "Profile: updates must be >= 0, got {", updates.first, ", ", updates.second, "}");
  TORCH_CHECK(updates.first < updates.second, "Profile: updates must be {from, to} with from < to, got {",
              updates.first, ", ", updates.second, "}");
  TORCH_CHECK(!directory.empty(), "Profile: directory must be given");
  trainer = &its_trainer;
  if (its_trainer.is_first()) at_work = std::make_shared<detail::ProfiledUpdates>(its_trainer, updates, directory);
}

/// Other processes do not know that rank 0 does not begin.
GRADACCUM_INLINE detail::ProfileScope Profile::fit_scope() {
  try {
    if (at_work) at_work->prepare();
  } catch (const std::exception& error) {
    if (const auto peers = trainer->peers()) peers->give_up(error.what());
    throw;
  }
  return detail::ProfileScope(at_work);
}

/// In the middle of an epoch, and before the state is loaded, where a `fit` goes on from one.
GRADACCUM_INLINE void Profile::on_epoch_begin(std::int64_t) {
  if (at_work && trainer->status().resumed_from.empty()) at_work->begin("data");
}

/// Not that of an evaluation.
GRADACCUM_INLINE int Profile::forward_scope() {
  if (at_work && at::GradMode::is_enabled()) at_work->begin("forward", /*micro_batches=*/1);
  return 0;
}

GRADACCUM_INLINE void Profile::before_backward(Loss&) {
  if (at_work) at_work->enter("backward");
}

/// Comes before the backward pass where that takes the steps.
GRADACCUM_INLINE void Profile::before_close() {
  if (at_work && !trainer->steps_in_backward()) at_work->enter("reduce");
}

GRADACCUM_INLINE void Profile::after_backward(Gradients&) {
  if (at_work) at_work->enter(trainer->closing() ? "reduce" : "other");
}

GRADACCUM_INLINE void Profile::before_step(Gradients&) {
  if (at_work) at_work->enter("step");
}

GRADACCUM_INLINE void Profile::after_window(const Step&) {
  if (at_work) at_work->enter("other");
}

GRADACCUM_INLINE void Profile::at_boundary() {
  if (at_work) at_work->at_boundary();
}

}  // namespace gradaccum
