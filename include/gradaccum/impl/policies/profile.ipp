// SPDX-License-Identifier: Apache-2.0
// Profiles a Trainer's updates, by phase and by kind of memory.
#pragma once

#include <gradaccum/policies/profile.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/training/loop.hpp>
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

/// Measures memory by kind at the end of each phase. Counts the allocations that a `MemoryMeter` sees from construction
/// on, and older memory of the known kinds until it is freed.
class MemoryByPhase {
 public:
  explicit MemoryByPhase(TrainerBase& trainer) : trainer_(trainer) {
    std::unordered_set<const void*> known;
    trainer_.for_each_held([&](std::int64_t MemoryByKind::*kind, const at::Tensor& tensor) {
      if (kind == &MemoryByKind::state_copy && !trainer_.device().is_cpu()) return;  // pinned host memory
      for_each_storage(tensor, [&](const c10::Storage& storage) {
        if (known.insert(storage.unsafeGetStorageImpl()).second)
          older_.emplace_back(storage.getWeakStorageImpl(), static_cast<std::int64_t>(storage.nbytes()));
      });
    });
    rest_before_ = now().rest;
  }

  /// Ends a phase, and keeps its memory if it is the largest so far for that name. Memory that "forward" adds counts as
  /// activations at its end, and as rest in later phases.
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

/// Profiles a trainer's updates, divided into phases without gaps, on rank 0 only. Measures memory by kind in the
/// update before them, or in the one after them if they begin with the first.
struct ProfileRun {
  const Profile& options;
  TrainerBase& trainer;
  const std::int64_t measured = options.updates.first > 0 ? options.updates.first - 1 : options.updates.second;
  std::int64_t begun = 0;  // updates before the profile

  std::optional<Profiler> profiler = {};
  std::unique_ptr<at::RecordFunction> update_mark = {};  // marks an update in the trace
  std::optional<Profiler::Phase> phase = {};
  std::string phase_name = {};
  std::optional<MemoryByPhase> memory = {};
  ProfileReport measured_memory = {};  // only its memory is set
  std::optional<ProfileReport> report = {};

  /// Creates the directory, and throws if no profiler can start, before training begins.
  void prepare() const {
    if (!trainer.is_first() || report || trainer.updates() >= options.updates.second ||
        trainer.progress().options.smoke)
      return;
    check_can_profile("Profile");
    check_is_writable(options.directory);
  }

  /// Begins a phase, which ends the previous one.
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

  /// Begins a phase, and the profile or the measurement of memory if it is due. Does not begin either if the window has
  /// more than `micro_batches`, because an earlier `fit` opened it.
  void begin(const char* name, std::int64_t micro_batches = 0) {
    const auto& progress = trainer.progress();
    const bool can_begin = trainer.is_first() && progress.running && !progress.options.smoke && !progress.done();
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

  /// Ends the profile and the measurement of memory when they are complete or the fit is done.
  void at_boundary() {
    const bool over = trainer.progress().done();
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
    update_mark = trace_mark("update " + std::to_string(trainer.updates() + 1));
  }

  /// Keeps the measured memory if its update was completed, and adds it to a report that exists.
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
    write_profile(options.directory, *report);
  }

  /// Drops the profile and the measurement without writing a file.
  void abandon() {
    phase.reset();
    update_mark.reset();
    profiler.reset();
    memory.reset();
    phase_name.clear();
  }

  /// Drops an unfinished profile when the fit ends. If it cannot start, ends the other ranks' fit, too.
  std::shared_ptr<void> fit_scope() {
    try {
      prepare();
    } catch (const std::exception& error) {
      if (const auto peers = Loop::of(trainer).peers()) peers->give_up(error.what());
      throw;
    }
    return {nullptr, [this](void*) { abandon(); }};
  }
  /// Does nothing if the fit resumes, since its state may not be loaded yet; then a boundary or a forward pass begins.
  void on_epoch_begin(std::int64_t) {
    if (trainer.progress().resumed_from.empty()) begin("data");
  }
  /// Ignores the forward passes of evaluations.
  int forward_scope() {
    if (at::GradMode::is_enabled()) begin("forward", /*micro_batches=*/1);
    return 0;
  }
  void before_backward(Loss&) { enter("backward"); }
  /// Does nothing if the backward pass steps, since this is then called before that pass.
  void before_close() {
    if (!trainer.steps_in_backward()) enter("reduce");
  }
  void after_backward(Gradients&) { enter(trainer.closing() ? "reduce" : "other"); }
  void before_step(Gradients&) { enter("step"); }
  void after_window(const Step&) { enter("other"); }
};

}  // namespace detail

GRADACCUM_INLINE const ProfileReport* Profile::Running::report() const {
  return run_ && run_->report ? &*run_->report : nullptr;
}

GRADACCUM_INLINE std::shared_ptr<PolicyRun> Profile::Running::start(TrainerBase& trainer) {
  TORCH_CHECK(updates.first >= 0, "Profile: updates must be >= 0, got {", updates.first, ", ", updates.second, "}");
  TORCH_CHECK(updates.first < updates.second, "Profile: updates must be {from, to} with from < to, got {",
              updates.first, ", ", updates.second, "}");
  TORCH_CHECK(!directory.empty(), "Profile: directory must be given");
  return detail::started_and_kept<detail::ProfileRun>(run_, *this, trainer);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
