// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>
#include <gradaccum/profiler.hpp>

#include <filesystem>

namespace gradaccum {

/// Policy: where time and memory go, in some updates of `fit`, by LibTorch's own profiler.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Profile{.updates = {2, 4}, .directory = "profiles/fit"});
///     trainer.fit(batches);
///     std::cout << *trainer.policy<ga::Profile>().report();
///
/// From `updates.first` updates until `updates.second` each moment is in one phase:
///
/// | phase | what it is |
/// |---|---|
/// | `data` | between two micro-batches: the next batch, and what policies do there that are listed behind, as saving |
/// | `forward` | the objective |
/// | `backward` | until the gradients are there; with `OptimizerInBackward` the steps, too |
/// | `reduce` | until the window's mean is there: what is left to exchange between processes |
/// | `step` | clipping, and until the parameters have moved |
/// | `other` | policies hear of it: averages, logs, validation |
///
/// List it first among the policies, so that their work falls as the table says. `trace.json`, for Perfetto
/// (ui.perfetto.dev) and chrome://tracing, and `profile.txt` are written when the last of these updates is over, or
/// when `fit` ends before. An exception ends the profile, without files.
///
/// Memory by kind is measured in the update before them (if `first` is 0, the one behind them), as a profile and that
/// need LibTorch's one slot: at the end of each phase, and where there are several of a name, that with the most. Its
/// sum is what a `MemoryMeter` counts that begins with this update, and the parameters, state and gradients from
/// before; no other older tensors.
///
/// Of several processes rank 0 does this. Not together with `FitOptions::measure_memory`, a `MemoryMeter` or another
/// profiler around `fit`: an error when `fit` begins. Nothing is profiled in a `.smoke` fit.
///
/// @note Outside of these updates it costs nothing and does not synchronize. See `Profiler` for the cost inside.
struct Profile {
  static constexpr bool looks_on = true;

  std::pair<std::int64_t, std::int64_t> updates = {10, 13};  ///< 0 <= first < second
  std::filesystem::path directory = {};                      ///< made where it is not there
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the state of the policy

  /// None before the last of these updates.
  const ProfileReport* report() const;

  void attach(TrainerBase& trainer);
  std::shared_ptr<void> fit_scope();
  void on_epoch_begin(std::int64_t epoch);
  int forward_scope();
  void before_backward(Loss& loss);
  void before_close();
  void after_backward(Gradients& gradients);
  void before_step(Gradients& gradients);
  void after_window(const Step& step);
  void at_boundary();
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/profile.ipp>
#endif
