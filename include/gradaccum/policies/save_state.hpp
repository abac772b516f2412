// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/background_saver.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/training_state.hpp>

#include <filesystem>
#include <initializer_list>

namespace gradaccum {

/// Signals that end a `fit`: a list, or true for the signals that schedulers and terminals send before they end a
/// program (SIGTERM; SIGUSR1, as by Slurm's `--signal=USR1@120`; SIGUSR2 of LSF and Grid Engine; SIGHUP; SIGINT).
class StopOn {
 public:
  StopOn() = default;
  template <std::same_as<bool> Flag>  // otherwise a signal's number would convert to true
  StopOn(Flag of_schedulers)          // NOLINT(google-explicit-constructor): as `.on_signals = true`
      : signals_(of_schedulers ? usual() : std::vector<int>()) {}
  StopOn(std::initializer_list<int> signals) : signals_(signals) {}
  StopOn(std::initializer_list<bool>) = delete;  // {true} would be signal 1
  const std::vector<int>& signals() const { return signals_; }
  static std::vector<int> usual();  ///< the signals for true

 private:
  std::vector<int> signals_;
};

/// Policy: saves states of the training, so that a killed run can resume bit for bit.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::SaveState{.directory = "runs/2", .every_updates = 2, .keep_last = 2});
///     auto report = trainer.fit(batches, {.epochs = 1, .resume = "runs/2"});
///     std::cout << (report.resumed_from.empty() ? "from the beginning" : report.resumed_from) << '\n';
///
/// Writes states like `ga::save` every `every_updates` updates or `every_minutes`, and at the end of `fit`. A signal of
/// `on_signals` saves after the current micro-batch and ends `fit` without its tail. `.smoke` fits save nothing.
///
/// Resuming. `.resume` loads the newest state, if any. With the same machine, program, threads and data, a resumed run
/// is bitwise identical. Batches with `state(Archive&)`, as in `ga::data`, resume at their position; other ranges are
/// iterated again up to it, with their epoch's random numbers. Your own policies and optimizers need `state(Archive&)`,
/// too: the constructor throws if an optimizer lacks it.
///
/// Best states. With a `Validate`, `keep_best` also saves when `metric` is among the best so far, and keeps these
/// states; `ga::load(directory, trainer, {.best = true})` loads the best.
///
/// @note Training waits while a state is copied to host memory, and continues while a thread writes it (see
/// `BackgroundSaver`): errors of the thread are thrown between later micro-batches. `fit` returns when the last state
/// is on the disk. With `.in_background = false` no memory is taken, and each save waits for the disk.
struct SaveState {
  static constexpr std::string_view name = "save_state";

  std::filesystem::path directory = {};     ///< created if it does not exist; for one run only
  std::int64_t every_updates = 1000;        ///< updates between two states, >= 1
  double every_minutes = 0;                 ///< since the last state, checked after each update, >= 0; 0: not by time
  std::int64_t keep_last = 3;               ///< number of newest states to keep, >= 1; 0: all
  StopOn on_signals = {};                   ///< signals handled while `fit` runs: true, or a list, {SIGTERM, SIGUSR1}
  std::int64_t keep_best = 0;               ///< number of best states to keep in addition, >= 0
  std::string metric = "loss";              ///< name in `Validate` of the number that decides which states are best
  std::optional<Mode> mode = {};            ///< whether lower or higher is better; optional if the metric defines it
  bool in_background = true;                ///< write a copy of the state on a thread while training continues
  WhenBusy when_busy = WhenBusy::wait;      ///< for a state that is due while the previous one is being written
  bool stage_on_device = false;             ///< copy within the device's memory first: see `BackgroundSaverOptions`
  std::vector<std::string> leave_out = {};  ///< names of buffers to leave out, such as buffers that grow with the data

  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/save_state.ipp>
#endif
