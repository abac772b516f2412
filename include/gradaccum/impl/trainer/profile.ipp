// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/profiled_updates.hpp>
#include <gradaccum/policies/profile.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/trainer_base.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <exception>

#include <gradaccum/impl/begin.ipp>

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

namespace gradaccum::detail {

GRADACCUM_INLINE ProfiledUpdates::ProfiledUpdates(TrainerBase& trainer, std::pair<std::int64_t, std::int64_t> updates,
                                                  std::filesystem::path directory)
    : trainer_(trainer),
      updates_(updates),
      directory_(std::move(directory)),
      measured_(updates.first > 0 ? updates.first - 1 : updates.second) {}

GRADACCUM_INLINE void ProfiledUpdates::prepare() const {
  if (report_ || trainer_.updates() >= updates_.second || trainer_.status().options.smoke) return;
  check_can_profile("Profile");
  make_directory(directory_);
}

GRADACCUM_INLINE void ProfiledUpdates::enter(const char* phase) {
  if (!at_work() || phase_name_ == phase) return;
  end_phase();
  phase_name_ = phase;
  if (profiler_) phase_.emplace(*profiler_, phase_name_);
}

GRADACCUM_INLINE void ProfiledUpdates::end_phase() {
  phase_.reset();
  if (memory_ && !phase_name_.empty()) memory_->end(phase_name_);
  phase_name_.clear();
}

GRADACCUM_INLINE void ProfiledUpdates::at_boundary() {
  const bool over = trainer_.status().done();
  const auto made = trainer_.updates();
  if (memory_ && (made > measured_ || over)) end_memory();
  if (profiler_ && (made >= updates_.second || over)) end_profile();
  if (profiler_ && trainer_.window().micro_batches == 0) mark_update();
  begin("data");
}

/// A window that is open already is another `fit`'s.
GRADACCUM_INLINE void ProfiledUpdates::begin(const char* phase, std::int64_t micro_batches) {
  const auto& status = trainer_.status();
  const bool can_begin = status.running && !status.options.smoke && !status.done();
  if (!at_work() && can_begin && trainer_.window().micro_batches <= micro_batches) begin_if_due();
  enter(phase);
}

GRADACCUM_INLINE void ProfiledUpdates::begin_if_due() {
  begun_ = trainer_.updates();
  if (begun_ == measured_ && measured_memory_.memory.empty()) {
    memory_.emplace([&trainer = trainer_](MemoryByPhase::SeeHeld see) { trainer.for_each_held(see); });
  } else if (begun_ >= updates_.first && begun_ < updates_.second && !report_) {
    profiler_.emplace(ProfilerOptions{.directory = directory_});
    mark_update();
  }
}

GRADACCUM_INLINE void ProfiledUpdates::mark_update() {
  end_phase();
  update_.reset();
  update_.emplace("update " + std::to_string(trainer_.updates() + 1));
}

/// One that has not come to its end says nothing.
GRADACCUM_INLINE void ProfiledUpdates::end_memory() {
  end_phase();
  if (trainer_.updates() > measured_) {
    measured_memory_.memory = memory_->phases();
    measured_memory_.peak_bytes = memory_->peak_bytes();
  }
  memory_.reset();
  if (!report_) return;
  report_->memory = measured_memory_.memory;
  report_->peak_bytes = measured_memory_.peak_bytes;
  write_profile(directory_, *report_);
}

GRADACCUM_INLINE void ProfiledUpdates::end_profile() {
  end_phase();
  update_.reset();
  measured_memory_.updates = trainer_.updates() - begun_;
  report_ = profiler_->finish(measured_memory_);
  profiler_.reset();
}

GRADACCUM_INLINE void ProfiledUpdates::abandon() {
  phase_.reset();
  update_.reset();
  profiler_.reset();
  memory_.reset();
  phase_name_.clear();
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
