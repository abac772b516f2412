// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/archive.hpp>
#include <gradaccum/metrics_file.hpp>
#include <gradaccum/policy.hpp>

#include <chrono>
#include <filesystem>

namespace gradaccum {

/// Policy: writes a line per window to a CSV or JSON Lines file.
///
///     ga::Trainer trainer(model, sgd, objective, ga::MetricsLog{.path = "train.jsonl", .every = 2});
///     trainer.fit(batches);
///
/// Its fields are update, epoch, samples (of this `fit` so far), items and micro_batches (of the window), moved, loss,
/// grad_norm, lr and seconds. A `Validate` adds a line with update, epoch, samples, seconds and its metrics, such as
/// `validation/loss`; for a CSV file these lines go to a second file, `train.validation.csv`.
///
/// Resuming. With `append` and `.resume`, `fit` first removes the lines that the last run wrote after the loaded state,
/// or all of its lines if it had saved none. Lines are passed to the operating system before each state and at the end
/// of `fit`; a killed process loses the lines of the last second.
///
/// Only rank 0 writes. For a loop of your own use `MetricsFile`.
///
/// @note Reads loss and norm from the device for each line.
struct MetricsLog {
  std::filesystem::path path = {};  ///< `.csv` or `.jsonl`
  std::int64_t every = 1;           ///< windows per line, >= 1
  bool append = false;              ///< append to an existing file rather than overwrite it
  std::chrono::duration<double> flush_every = std::chrono::seconds(1);  ///< how long lines may be buffered

  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/metrics_log.ipp>
#endif
