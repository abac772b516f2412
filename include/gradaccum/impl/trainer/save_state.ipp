// SPDX-License-Identifier: Apache-2.0
// Saves states on a schedule, on signals and when a metric is best.
#pragma once

#include <gradaccum/policies/save_state.hpp>

#include <gradaccum/detail/trainer/loop.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <signal.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE std::vector<int> StopOn::usual() { return {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}; }

struct SaveState::Run {
  TrainerBase& trainer;
  bool rehearsed = false;                          // a state can be written
  std::optional<std::filesystem::path> last = {};  // the last state that this fit saved
  bool due = false, best_is_due = false, finished = false;
  std::optional<double> measured = {};  // of the current parameters
  std::vector<double> best = {};        // the best first
  std::unique_ptr<detail::StopSignals> signals = {};
  FitStatus::Clock::time_point saved = FitStatus::Clock::now();  // or begun
  std::unique_ptr<BackgroundSaver> saver = {};                   // the last member, as its thread uses the others

  /// Throws if a state cannot be saved, so that this is found early. False if it is too early to check.
  bool rehearse(const std::filesystem::path& folder) const {
    const auto peers = trainer.peers();
    if (peers && peers->take_each_backward() && trainer.window().micro_batches > 0) return false;
    if (trainer.is_first()) detail::check_is_newest(folder, trainer.updates());
    detail::check_can_be_saved(trainer);
    return true;
  }

  void begin_saving_in_background(const SaveState& options) {
    saver.reset(new BackgroundSaver(options.directory,
                                    {.when_busy = options.when_busy, .stage_on_device = options.stage_on_device}));
    trainer.loop().state_copy = &saver->copy_.memory();
    trainer.loop().finish_background_save = [this] { saver->join(); };
  }

  /// Saves, or begins to save in the background. `must_not_be_skipped`: waits for a state that is still being written.
  void save(const SaveState& options, bool must_not_be_skipped) {
    const auto keep = [this, directory = options.directory, keep_last = options.keep_last,
                       keep_best = options.keep_best](const std::filesystem::path& path) {
      detail::StateDirectory states(directory);
      last = last ? states.replace(*last, path) : path;
      if (keep_last > 0) states.keep_last(keep_last, detail::best_states(directory, keep_best));
      return *last;
    };
    auto& loop = trainer.loop();
    loop.status.wants_save = loop.status.saves = false;
    if (saver) {
      if (must_not_be_skipped) saver->wait();
      if (!saver->save(trainer, keep)) return;
    } else if (const auto path = gradaccum::save(options.directory, trainer); trainer.is_first()) {
      keep(path);
    }
    saved = FitStatus::Clock::now();
  }
};

GRADACCUM_INLINE void SaveState::attach(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "SaveState: directory must be given");
  TORCH_CHECK(every_updates >= 1, "SaveState: every_updates must be >= 1, got ", every_updates);
  TORCH_CHECK(every_minutes >= 0, "SaveState: every_minutes must be >= 0, got ", every_minutes);
  for (const int signal : on_signals.signals())
    TORCH_CHECK(signal > 0 && signal < NSIG && signal != SIGKILL && signal != SIGSTOP,
                "SaveState: on_signals must be signals that a program can catch, got ", signal);
  TORCH_CHECK(keep_last >= 0, "SaveState: keep_last must be >= 0, got ", keep_last);
  TORCH_CHECK(keep_best >= 0, "SaveState: keep_best must be >= 0, got ", keep_best);
  if (keep_best > 0)
    trainer.when_built([this, &trainer] { mode = detail::mode_of("SaveState", metric, mode, &trainer.metrics()); });
  trainer.check_optimizer_state();
  trainer.loop().left_out = leave_out;
  run.reset(new Run{trainer});
}

GRADACCUM_INLINE std::shared_ptr<void> SaveState::fit_scope() {
  run.reset(new Run{.trainer = run->trainer, .rehearsed = run->rehearsed});
  if (!run->trainer.status().options.smoke)
    detail::run_on_all(run->trainer.peers().get(), [this] {
      if (!run->trainer.is_first()) return;
      detail::StateDirectory(directory).sweep();  // even if the fit saves nothing
      detail::check_is_writable(directory);
    });
  if (!on_signals.signals().empty()) run->signals = std::make_unique<detail::StopSignals>(on_signals.signals());
  if (in_background) run->begin_saving_in_background(*this);
  return {nullptr, [run = run](void*) {
            run->signals.reset();
            run->trainer.loop().state_copy = nullptr;
            run->trainer.loop().finish_background_save = nullptr;
            run->saver.reset();
          }};
}

GRADACCUM_INLINE void SaveState::before_backward(Loss&) { run->finished = false; }
/// Resets `finished` here, too, because the tail of a stopped fit closes a window without a backward pass.
GRADACCUM_INLINE void SaveState::after_window(const Step&) { run->finished = false; }

GRADACCUM_INLINE void SaveState::after_step(const Step& step) {
  run->due = run->due || step.update % every_updates == 0;
  const std::chrono::duration<double, std::ratio<60>> since = FitStatus::Clock::now() - run->saved;
  auto& status = run->trainer.loop().status;
  if (every_minutes > 0 && since.count() >= every_minutes) (status.together ? status.wants_save : run->due) = true;
  run->measured.reset();
}

GRADACCUM_INLINE void SaveState::on_validation(const Validation& validation) {
  const auto number = keep_best > 0 ? validation[metric] : std::nullopt;
  if (!number) return;
  run->measured = number;
  auto& best = run->best;
  const auto count = static_cast<std::size_t>(keep_best);
  const auto position =
      std::find_if(best.begin(), best.end(), [&](double other) { return detail::is_better(*mode, *number, other); });
  if (detail::is_nan(*number) || (position == best.end() && best.size() >= count)) return;
  if (position == best.begin()) detail::warn_if_last("SaveState", metric, *mode, *number);
  best.insert(position, *number);
  if (best.size() > count) best.pop_back();
  run->best_is_due = true;
}

GRADACCUM_INLINE void SaveState::state(Archive& archive) {
  using Text = std::optional<std::string>;
  auto& measured = run->measured;
  detail::MeasuredState of{.metric = measured ? Text(metric) : Text(),
                           .better = measured ? Text(*mode == Mode::min ? "min" : "max") : Text(),
                           .number = measured};
  of.state(archive);
  std::vector<double> bests;
  for (std::optional<double> number = 0; number;) {
    const auto i = bests.size();
    number = i < run->best.size() ? std::optional(run->best[i]) : std::nullopt;
    archive("best" + std::to_string(i), number);
    if (number) bests.push_back(*number);
  }
  run->finished = run->finished || archive.loading();
  if (!archive.loading()) return;
  measured = mode && of.metric == metric ? of.number : std::nullopt;
  run->best = std::move(bests);
}

GRADACCUM_INLINE void SaveState::at_boundary() {
  auto& trainer = run->trainer;
  const auto& status = trainer.status();
  if (status.options.smoke) return;
  if (!std::exchange(run->rehearsed, true)) run->rehearsed = run->rehearse(directory);
  const int signal = run->signals ? run->signals->received() : 0;
  if (signal != 0) trainer.interrupt(signal);
  const bool ends = status.done() && (!run->finished || status.signal != 0);  // status.signal is set on all ranks
  if (run->saver) run->saver->check();
  if (run->due || run->best_is_due || status.saves || ends) run->save(*this, ends || run->best_is_due);
  if (run->saver && status.done()) run->saver->wait();
  run->due = run->best_is_due = false;
  run->finished = run->finished || ends;
}

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<SaveState>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
