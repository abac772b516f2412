// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/fit_options.hpp>
#include <gradaccum/metrics_file.hpp>
#include <gradaccum/policy.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>

namespace gradaccum {

/// Policy: a line for each window, in a CSV or JSON Lines file: update, epoch, samples (of this `fit` so far), items
/// and micro_batches (of the window), moved, loss, grad_norm, lr, seconds.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     }, ga::MetricsLog{.path = "train.jsonl", .every = 2});
///     trainer.fit(batches);
///
/// `MetricsFile` says how it is written, and is the part for a loop of one's own. Of several processes rank 0 writes.
///
/// @note Reads loss and norm from the device for each line.
struct MetricsLog {
  std::filesystem::path path = {};  ///< `.csv` or `.jsonl`
  std::int64_t every = 1;           ///< windows a line, >= 1
  bool append = false;              ///< go on with a file that is there; else it is begun anew
  std::shared_ptr<MetricsFile> file = nullptr;
  const FitStatus* status = nullptr;  ///< the trainer's
  std::int64_t windows = 0;

  void attach(TrainerBase& trainer);
  void after_window(const Step& step);
  void write(const Step& step) const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/policies/metrics_log.ipp>
#endif
