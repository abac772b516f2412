// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/kineto_session.hpp>
#include <gradaccum/profiler.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

namespace gradaccum {
class TrainerBase;
}

namespace gradaccum::detail {

/// What `Profile` does: a Trainer's updates from one number to another are profiled, each moment of them in one phase;
/// and another update is measured before them, or behind them if there is none, by kinds of memory.
class ProfiledUpdates {
 public:
  ProfiledUpdates(TrainerBase& trainer, std::pair<std::int64_t, std::int64_t> updates, std::filesystem::path directory);

  /// Before hours have gone by: the directory is made. Throws where no profiler can start.
  void prepare() const;
  /// `phase` begins, and what went before it ends.
  void enter(const char* phase);
  /// The same; and an update may begin with it, if its window has no more micro-batches than so many.
  void begin(const char* phase, std::int64_t micro_batches = 0);
  /// Between two micro-batches.
  void at_boundary();
  /// All at once, without a file.
  void abandon();

  const std::optional<ProfileReport>& report() const { return report_; }

 private:
  bool at_work() const { return profiler_ || memory_; }
  void begin_if_due();
  void end_phase();
  void end_memory();
  void end_profile();
  void mark_update();

  TrainerBase& trainer_;
  std::pair<std::int64_t, std::int64_t> updates_;
  std::filesystem::path directory_;
  std::int64_t measured_;   // this update's memory
  std::int64_t begun_ = 0;  // updates before the profile

  std::optional<Profiler> profiler_;
  std::optional<TraceMark> update_;  // of its trace
  std::optional<Profiler::Phase> phase_;
  std::string phase_name_;
  std::optional<MemoryByPhase> memory_;
  ProfileReport measured_memory_;  // of it the memory alone
  std::optional<ProfileReport> report_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/profile.ipp>
#endif
