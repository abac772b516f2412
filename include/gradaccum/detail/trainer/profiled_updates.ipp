// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/profiled_updates.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/watching/kineto_session.hpp>
#include <gradaccum/trainer_base.hpp>

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
