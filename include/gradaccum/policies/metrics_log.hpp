// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/metrics_file.hpp>
#include <gradaccum/policy.hpp>

#include <chrono>
#include <filesystem>

namespace gradaccum {

/// Policy: a line for each window, in a CSV or JSON Lines file: update, epoch, samples (of this `fit` so far), items
/// and micro_batches (of the window), moved, loss, grad_norm, lr, seconds. What a `Validate` finds is a line, too:
/// update, epoch, samples, seconds, `validation/loss` and so on; beside a CSV file, whose lines are all alike, in
/// another one, `train.validation.csv`.
///
///     ga::Trainer trainer(model, sgd, objective, ga::MetricsLog{.path = "train.jsonl", .every = 2});
///     trainer.fit(batches);
///
/// With `append` a `fit` that is given `.resume` first removes the lines that the last run has written after the state
/// (all of its lines, where there is none yet). All lines are with the operating system before a state is, and when
/// `fit` ends; a training that is killed loses those of the last second. `MetricsFile` says how it is written, and is
/// the part for a loop of one's own. Of several processes rank 0 writes.
///
/// @note Reads loss and norm from the device for each line.
struct MetricsLog {
  std::filesystem::path path = {};  ///< `.csv` or `.jsonl`
  std::int64_t every = 1;           ///< windows a line, >= 1
  bool append = false;              ///< go on with a file that is there; else it is begun anew
  std::chrono::duration<double> flush_every = std::chrono::seconds(1);  ///< how long lines may wait, while more come
  std::string name = {};  ///< not an option, like the next: tells several logs apart in a state
  struct Run;
  std::shared_ptr<Run> run = {};  ///< the state of the policy

  void attach(TrainerBase& trainer);
  std::shared_ptr<void> fit_scope();
  void after_window(const Step& step);
  void on_validation(const Validation& validation);
  void at_boundary() const;
  /// Saves nothing of its own: so what was written is on the disk before the state is.
  void state(Archive& archive) const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/metrics_log.ipp>
#endif
