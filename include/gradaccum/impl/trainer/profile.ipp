// SPDX-License-Identifier: Apache-2.0
// Profiles a Trainer's updates, by phase and by kind of memory.
#pragma once

#include <gradaccum/policies/profile.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/profiler.hpp>
#include <gradaccum/trainer_base.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <exception>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// The memory by kind at the end of each phase. Counts what a `MemoryMeter` counts from construction on, and older
/// memory of the known kinds until it is freed.
class MemoryByPhase {
 public:
  explicit MemoryByPhase(TrainerBase& trainer) : trainer_(trainer) {
    std::unordered_set<const void*> known;
    trainer_.for_each_held([&](std::int64_t MemoryByKind::*kind, const at::Tensor& tensor) {
      if (kind == &MemoryByKind::state_copy && !trainer_.device().is_cpu()) return;  // pinned, and not on the device
      for_each_storage(tensor, [&](const c10::Storage& storage) {
        if (known.insert(storage.unsafeGetStorageImpl()).second)
          older_.emplace_back(storage.getWeakStorageImpl(), static_cast<std::int64_t>(storage.nbytes()));
      });
    });
    rest_before_ = now().rest;
  }

  /// Ends a phase, and keeps its memory if it is the largest so far for that name. Memory that "forward" has added
  /// counts as activations at its end, and as rest from the next phase on.
  void end(const std::string& phase) {
    auto bytes = now();
    const auto rest = bytes.rest;
    if (phase == "forward") {
      bytes.activations = std::max<std::int64_t>(rest - rest_before_, 0);
      bytes.rest = rest - bytes.activations;
    }
    rest_before_ = rest;
    const auto same = std::find_if(phases_.begin(), phases_.end(), [&](auto& other) { return other.phase == phase; });
    if (same == phases_.end())
      phases_.push_back({phase, bytes});
    else if (bytes.total() > same->bytes.total())
      same->bytes = bytes;
  }

  const std::vector<ProfiledMemory>& phases() const { return phases_; }
  std::int64_t peak_bytes() const { return older_bytes() + meter_.peak_bytes(); }

 private:
  MemoryByKind now() const {
    auto bytes = trainer_.memory_by_kind();
    if (!trainer_.device().is_cpu()) bytes.state_copy = 0;
    bytes.rest = older_bytes() + meter_.live_bytes() - bytes.total();
    return bytes;
  }

  std::int64_t older_bytes() const {
    std::int64_t bytes = 0;
    for (auto& [storage, its_bytes] : older_)
      if (!storage.expired()) bytes += its_bytes;
    return bytes;
  }

  TrainerBase& trainer_;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::int64_t>> older_;
  std::vector<ProfiledMemory> phases_;
  std::int64_t rest_before_ = 0;
  MemoryMeter meter_;
};

}  // namespace detail

/// Profiles a trainer's updates, each moment of them in one phase. Another update is measured before them, or after
/// them if there is none, by kinds of memory. Begins on rank 0 alone.
struct Profile::Run {
  const Profile& options;
  TrainerBase& trainer;
  const std::int64_t measured = options.updates.first > 0 ? options.updates.first - 1 : options.updates.second;
  std::int64_t begun = 0;  // updates before the profile

  std::optional<Profiler> profiler = {};
  std::unique_ptr<at::RecordFunction> update_mark = {};  // in the trace
  std::optional<Profiler::Phase> phase = {};
  std::string phase_name = {};
  std::optional<detail::MemoryByPhase> memory = {};
  ProfileReport measured_memory = {};  // has the memory alone
  std::optional<ProfileReport> report = {};

  /// Makes the directory before hours have gone by. Throws where no profiler can start.
  void prepare() const {
    if (!trainer.is_first() || report || trainer.updates() >= options.updates.second || trainer.status().options.smoke)
      return;
    detail::check_can_profile("Profile");
    detail::check_is_writable(options.directory);
  }

  /// Begins a phase, which ends the one before it.
  void enter(const char* name) {
    if ((!profiler && !memory) || phase_name == name) return;
    end_phase();
    phase_name = name;
    if (profiler) phase.emplace(*profiler, phase_name);
  }

  void end_phase() {
    phase.reset();
    if (memory && !phase_name.empty()) memory->end(phase_name);
    phase_name.clear();
  }

  /// Begins a phase, and with it an update that is due, if its window has at most so many micro-batches: one that was
  /// open already is another `fit`'s.
  void begin(const char* name, std::int64_t micro_batches = 0) {
    const auto& status = trainer.status();
    const bool can_begin = trainer.is_first() && status.running && !status.options.smoke && !status.done();
    if (!profiler && !memory && can_begin && trainer.window().micro_batches <= micro_batches) {
      begun = trainer.updates();
      if (begun == measured && measured_memory.memory.empty()) {
        memory.emplace(trainer);
      } else if (begun >= options.updates.first && begun < options.updates.second && !report) {
        profiler.emplace(ProfilerOptions{.directory = options.directory});
        mark_update();
      }
    }
    enter(name);
  }

  /// Comes between two micro-batches.
  void at_boundary() {
    const bool over = trainer.status().done();
    const auto made = trainer.updates();
    if (memory && (made > measured || over)) end_memory();
    if (profiler && (made >= options.updates.second || over)) {
      end_phase();
      update_mark.reset();
      measured_memory.updates = made - begun;
      report = profiler->finish(measured_memory);
      profiler.reset();
    }
    if (profiler && trainer.window().micro_batches == 0) mark_update();
    begin("data");
  }

  void mark_update() {
    end_phase();
    update_mark.reset();
    update_mark = detail::trace_mark("update " + std::to_string(trainer.updates() + 1));
  }

  /// Discards the memory of an update that has not come to its end.
  void end_memory() {
    end_phase();
    if (trainer.updates() > measured) {
      measured_memory.memory = memory->phases();
      measured_memory.peak_bytes = memory->peak_bytes();
    }
    memory.reset();
    if (!report) return;
    report->memory = measured_memory.memory;
    report->peak_bytes = measured_memory.peak_bytes;
    detail::write_profile(options.directory, *report);
  }

  /// Ends everything at once, without a file.
  void abandon() {
    phase.reset();
    update_mark.reset();
    profiler.reset();
    memory.reset();
    phase_name.clear();
  }
};

GRADACCUM_INLINE const ProfileReport* Profile::report() const { return run && run->report ? &*run->report : nullptr; }

GRADACCUM_INLINE void Profile::attach(TrainerBase& trainer) {
  TORCH_CHECK(updates.first >= 0, "Profile: updates must be >= 0, got {", updates.first, ", ", updates.second, "}");
  TORCH_CHECK(updates.first < updates.second, "Profile: updates must be {from, to} with from < to, got {",
              updates.first, ", ", updates.second, "}");
  TORCH_CHECK(!directory.empty(), "Profile: directory must be given");
  run.reset(new Run{.options = *this, .trainer = trainer});
}

/// Ends what an exception has left at work. Other processes do not know that rank 0 does not begin.
GRADACCUM_INLINE std::shared_ptr<void> Profile::fit_scope() {
  try {
    run->prepare();
  } catch (const std::exception& error) {
    if (const auto peers = run->trainer.peers()) peers->give_up(error.what());
    throw;
  }
  return {nullptr, [run = run](void*) { run->abandon(); }};
}

/// Begins nothing in the middle of an epoch, where a `fit` that resumes has not loaded its state yet.
GRADACCUM_INLINE void Profile::on_epoch_begin(std::int64_t) {
  if (run->trainer.status().resumed_from.empty()) run->begin("data");
}

/// Leaves out the forward passes of evaluations.
GRADACCUM_INLINE int Profile::forward_scope() {
  if (at::GradMode::is_enabled()) run->begin("forward", /*micro_batches=*/1);
  return 0;
}

GRADACCUM_INLINE void Profile::before_backward(Loss&) { run->enter("backward"); }

/// Comes before the backward pass where that takes the steps.
GRADACCUM_INLINE void Profile::before_close() {
  if (!run->trainer.steps_in_backward()) run->enter("reduce");
}

GRADACCUM_INLINE void Profile::after_backward(Gradients&) { run->enter(run->trainer.closing() ? "reduce" : "other"); }

GRADACCUM_INLINE void Profile::before_step(Gradients&) { run->enter("step"); }
GRADACCUM_INLINE void Profile::after_window(const Step&) { run->enter("other"); }
GRADACCUM_INLINE void Profile::at_boundary() { run->at_boundary(); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
