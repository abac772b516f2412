// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/policy.hpp>
#include <gradaccum/progress_line.hpp>

namespace gradaccum {

/// Policy: shows the progress of `fit` on stderr:
/// ` 43% | epoch 2/3 | update 401 | loss 2.2512 | lr 1.0e-03 | 31024 samples/s | 0:41 left`.
///
/// On a terminal one line is rewritten ten times per second; otherwise a line is printed every 30 seconds. A Trainer
/// without this policy shows progress on terminals only; `ga::Progress{.line = {.to = nullptr}}` shows nothing. `loss`
/// is the mean over the epoch so far, followed by the latest validation loss, if any. Only rank 0 shows progress.
///
/// @note Reads the loss from the device each time it is shown.
struct Progress {
  static constexpr std::string_view name = "progress";

  ProgressLineOptions line = {};

  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/progress.ipp>
#endif
