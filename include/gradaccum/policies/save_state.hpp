// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/background_saver.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/training_state.hpp>

#include <filesystem>
#include <initializer_list>

namespace gradaccum {

/// Signals that end a `fit` when they come: a list, or true for those that schedulers and terminals send before they
/// end a program (SIGTERM; Slurm's `--signal=USR1@120`; SIGUSR2 of LSF and Grid Engine; SIGHUP; SIGINT, Ctrl-C).
class StopOn {
 public:
  StopOn() = default;
  template <std::same_as<bool> Flag>  // a number would be a signal that is taken for true
  StopOn(Flag of_schedulers)          // NOLINT(google-explicit-constructor): as `.on_signals = true`
      : signals_(of_schedulers ? usual() : std::vector<int>()) {}
  StopOn(std::initializer_list<int> signals) : signals_(signals) {}
  StopOn(std::initializer_list<bool>) = delete;  // {true} would be signal 1
  const std::vector<int>& signals() const { return signals_; }
  static std::vector<int> usual();  ///< those of true

 private:
  std::vector<int> signals_;
};

/// Policy: saves the training, so that it can be killed at any moment and goes on to the bit.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::SaveState{.directory = "runs/2", .every_updates = 2, .keep_last = 2});
///     auto report = trainer.fit(batches, {.epochs = 1, .resume = "runs/2"});
///     std::cout << (report.resumed_from.empty() ? "from the beginning" : report.resumed_from) << '\n';
///
/// States are what `ga::save` writes: every `every_updates` updates, with `every_minutes` also by the clock, when `fit`
/// has done all it was asked for (in place of one of the same update that it had saved before its last epoch ended),
/// and when one of `on_signals` comes: then after the micro-batch in hand, whether its window is full or not; `fit`
/// ends without its tail, and the report says which signal it was. `fit(batches, {.resume = directory})` takes the
/// newest state, or begins where there is none. Whether the directory can be written to shows before the first update.
///
/// What goes on is the same to the bit as what was never stopped, on one machine with the same program, threads and
/// data. Batches with a `state(Archive&)`, as `ga::data` has them, go on where they were; any other range is gone
/// through again up to there, without training, with the random numbers that its epoch began with. A policy or
/// optimizer of your own takes part by `state(Archive&)`; an optimizer that cannot is refused at once.
///
/// The training waits until the state is copied, and goes on while a thread writes the copy: see `BackgroundSaver`.
/// An error of that thread is thrown at the next boundary. `fit` ends when the last state is on the disk.
///
/// With a `Validate` beside it, `.keep_best = 1` also saves when `metric` is better than ever, and never removes the
/// best state, which `ga::load(directory, trainer, {.best = true})` loads. Nothing is saved in a `.smoke` fit.
///
/// @note Synchronizes when it saves; waits for the disk at the end of `fit`, and while an earlier state is written.
/// Takes host memory for a copy of the state until `fit` ends: with `.in_background = false` it takes none, and waits
/// for the disk.
struct SaveState {
  static constexpr std::string_view name = "save_state";

  std::filesystem::path directory = {};  ///< made where it is not there; of one run
  std::int64_t every_updates = 1000;     ///< >= 1
  double every_minutes = 0;              ///< since the last state, at the end of an update, >= 0; 0: not by the clock
  std::int64_t keep_last = 3;            ///< states that are kept, >= 1; 0: all
  StopOn on_signals = {};                ///< while `fit` runs: true, or a list, {SIGTERM, SIGUSR1}
  std::int64_t keep_best = 0;            ///< states of the best numbers that are kept beside these, >= 0
  std::string metric = "loss";           ///< the number that is compared, as `Validate` calls it
  std::optional<Mode> mode = {};         ///< which is better; need not be given where the metric tells
  bool in_background = true;             ///< write a copy of the state on a thread, while the training goes on
  WhenBusy when_busy = WhenBusy::wait;   ///< for a state that is due while the one before is being written
  bool stage_on_device = false;          ///< copy within the device's memory first: see `BackgroundSaverOptions`
  std::vector<std::string> leave_out = {};  ///< buffers that no state has, by name: those that grow with the data, say
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the state of the policy

  void attach(TrainerBase& trainer);
  std::shared_ptr<void> fit_scope();
  void before_backward(Loss&);
  void after_window(const Step&);
  /// A state that was just loaded is not saved again.
  void state(Archive& archive);
  void after_step(const Step& step);
  void on_validation(const Validation& validation);
  void at_boundary();
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/save_state.ipp>
#endif
