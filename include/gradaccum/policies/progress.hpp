// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/progress_line.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

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
  const FitStatus* status = nullptr;           ///< the trainer's
  std::function<std::int64_t()> updates = {};  ///< of the trainer
  std::shared_ptr<ProgressLine> shown = nullptr;
  detail::WeightedMean loss = {};
  double lr = 0;
  bool begun = false;

  void attach(TrainerBase& trainer);
  int fit_scope();
  void on_epoch_begin(std::int64_t);
  void after_window(const Step& step);
  void after_backward(Gradients&);
  void on_epoch_end(std::int64_t);

  /// Says where a fit that was to go on has begun.
  void begin() const;
  std::string text() const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/policies/progress.ipp>
#endif
