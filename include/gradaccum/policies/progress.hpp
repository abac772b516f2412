// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>
#include <gradaccum/progress_line.hpp>

namespace gradaccum {

/// Policy: shows how far `fit` is, on stderr:
/// ` 43% | epoch 2/3 | update 401 | loss 2.2512 | lr 1.0e-03 | 31024 samples/s | 0:41 left`.
///
/// On a terminal it is a line that is rewritten ten times a second; elsewhere a plain line every 30 seconds. A Trainer
/// without a Progress has one that shows itself on terminals only; `ga::Progress{.line = {.to = nullptr}}` shows
/// nothing. The loss is the mean over the epoch so far; after a `Validate` that loss is beside it. Of several processes
/// rank 0 shows itself.
///
/// @note Reads the loss from the device when it is shown.
struct Progress {
  static constexpr std::string_view name = "progress";

  ProgressLineOptions line = {};
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the state of the policy

  void attach(TrainerBase& trainer);
  int fit_scope();
  void on_epoch_begin(std::int64_t);
  void after_window(const Step& step);
  void after_backward(Gradients&);
  void on_epoch_end(std::int64_t);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/progress.ipp>
#endif
