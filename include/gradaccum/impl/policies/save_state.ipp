// SPDX-License-Identifier: Apache-2.0
// Saves states on a schedule, on signals and when a metric is best.
#pragma once

#include <gradaccum/policies/save_state.hpp>

#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/platform/stop_signals.hpp>
#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE std::vector<int> StopOn::usual() { return detail::usual_stop_signals(); }

namespace detail {

struct SaveStateRun {
  static constexpr std::string_view name = SaveState::name;

  const SaveState& options;
  TrainerBase& trainer;

  /// The saved and the due states of one fit.
  struct OfFit {
    std::optional<std::filesystem::path> last = {};  // the last state that this fit saved
    bool due = false, best_is_due = false, finished = false;
    std::optional<double> measured = {};  // of the current parameters
    std::vector<double> best = {};        // the best first
    std::unique_ptr<StopSignals> signals = {};
    std::chrono::steady_clock::time_point saved = std::chrono::steady_clock::now();  // or begun
    std::unique_ptr<BackgroundSaver> saver = {};  // the last member, as its thread uses the others
  } fit = {};
  bool rehearsed = false;  // a state can be written

  /// Throws if a state cannot be saved, so that this is found early. False if it is too early to check.
  bool rehearse() const {
    const auto peers = Loop::of(trainer).peers();
    if (peers && peers->take_each_backward() && trainer.window().micro_batches > 0) return false;
    if (trainer.is_first()) check_is_newest(options.directory, trainer.updates());
    check_can_be_saved(trainer);
    return true;
  }

  void begin_saving_in_background() {
    fit.saver.reset(new BackgroundSaver(options.directory,
                                        {.when_busy = options.when_busy, .stage_on_device = options.stage_on_device}));
    Loop::of(trainer).set_background_save(&fit.saver->copy_.memory(), [this] { fit.saver->join(); });
  }

  void end_fit() {
    fit.signals.reset();
    Loop::of(trainer).set_background_save();
    fit.saver.reset();
  }

  std::shared_ptr<void> fit_scope() {
    fit = {};
    if (!trainer.progress().options.smoke)
      run_on_all(Loop::of(trainer).peers().get(), [this] {
        if (!trainer.is_first()) return;
        StateDirectory(options.directory).sweep();  // even if the fit saves nothing
        check_is_writable(options.directory);
      });
    if (const auto& signals = options.on_signals.signals(); !signals.empty())
      fit.signals = std::make_unique<StopSignals>(signals);
    if (options.in_background) begin_saving_in_background();
    return {nullptr, [this](void*) { end_fit(); }};
  }

  void before_backward(Loss&) { fit.finished = false; }
  /// Resets `finished` here, too, because the tail of a stopped fit closes a window without a backward pass.
  void after_window(const Step&) { fit.finished = false; }

  void after_step(const Step& step) {
    fit.due = fit.due || step.update % options.every_updates == 0;
    const std::chrono::duration<double, std::ratio<60>> since = std::chrono::steady_clock::now() - fit.saved;
    if (options.every_minutes > 0 && since.count() >= options.every_minutes) trainer.request_save();
    fit.measured.reset();
  }

  void on_validation(const Validation& validation) {
    const auto number = options.keep_best > 0 ? validation[options.metric] : std::nullopt;
    if (!number) return;
    fit.measured = number;
    auto& best = fit.best;
    const auto count = static_cast<std::size_t>(options.keep_best);
    const auto position =
        std::find_if(best.begin(), best.end(), [&](double other) { return is_better(*options.mode, *number, other); });
    if (is_nan(*number) || (position == best.end() && best.size() >= count)) return;
    if (position == best.begin()) warn_if_last("SaveState", options.metric, *options.mode, *number);
    best.insert(position, *number);
    if (best.size() > count) best.pop_back();
    fit.best_is_due = true;
  }

  /// Loading also prevents saving the loaded state again.
  void state(Archive& archive) {
    using Text = std::optional<std::string>;
    MeasuredState of{.metric = fit.measured ? Text(options.metric) : Text(),
                     .better = fit.measured ? Text(*options.mode == Mode::min ? "min" : "max") : Text(),
                     .number = fit.measured};
    of.state(archive);
    std::vector<double> bests;
    for (std::optional<double> number = 0; number;) {
      const auto i = bests.size();
      number = i < fit.best.size() ? std::optional(fit.best[i]) : std::nullopt;
      archive("best" + std::to_string(i), number);
      if (number) bests.push_back(*number);
    }
    fit.finished = fit.finished || archive.loading();
    if (!archive.loading()) return;
    fit.measured = options.mode && of.metric == options.metric ? of.number : std::nullopt;
    fit.best = std::move(bests);
  }

  void at_boundary() {
    const auto& progress = trainer.progress();
    if (progress.options.smoke) return;
    if (!std::exchange(rehearsed, true)) rehearsed = rehearse();
    const int signal = fit.signals ? fit.signals->received() : 0;
    if (signal != 0) trainer.interrupt(signal);
    const bool ends = progress.done() && (!fit.finished || progress.signal() != 0);  // the signal is set on all ranks
    if (fit.saver) fit.saver->check();
    if (fit.due || fit.best_is_due || Loop::of(trainer).is_save_requested() || ends) save(ends || fit.best_is_due);
    if (fit.saver && progress.done()) fit.saver->wait();
    fit.due = fit.best_is_due = false;
    fit.finished = fit.finished || ends;
  }

  /// Saves, or begins to save in the background. `must_not_be_skipped`: waits for a state that is still being written.
  void save(bool must_not_be_skipped) {
    const auto keep = [this, directory = options.directory, keep_last = options.keep_last,
                       keep_best = options.keep_best](const std::filesystem::path& path) {  // runs on a thread
      StateDirectory states(directory);
      fit.last = fit.last ? states.replace(*fit.last, path) : path;
      if (keep_last > 0) states.keep_last(keep_last, best_states(directory, keep_best));
      return *fit.last;
    };
    Loop::of(trainer).note_save();
    if (fit.saver) {
      if (must_not_be_skipped) fit.saver->wait();
      if (!fit.saver->save(trainer, keep)) return;
    } else if (const auto path = gradaccum::save(options.directory, trainer); trainer.is_first()) {
      keep(path);
    }
    fit.saved = std::chrono::steady_clock::now();
  }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> SaveState::start(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "SaveState: directory must be given");
  TORCH_CHECK(every_updates >= 1, "SaveState: every_updates must be >= 1, got ", every_updates);
  TORCH_CHECK(every_minutes >= 0, "SaveState: every_minutes must be >= 0, got ", every_minutes);
  for (const int signal : on_signals.signals())
    TORCH_CHECK(detail::can_be_caught(signal), "SaveState: on_signals must be signals that a program can catch, got ",
                signal);
  TORCH_CHECK(keep_last >= 0, "SaveState: keep_last must be >= 0, got ", keep_last);
  TORCH_CHECK(keep_best >= 0, "SaveState: keep_best must be >= 0, got ", keep_best);
  trainer.check_optimizer_state();
  if (!leave_out.empty()) trainer.leave_out(leave_out);
  if (keep_best > 0) mode = detail::mode_of("SaveState", metric, mode, &trainer.metrics());
  return detail::started<detail::SaveStateRun>(*this, trainer);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
