// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/progress_line.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum {

/// Policy: shows how far `fit` is, on stderr:
/// ` 43% | epoch 2/3 | update 401 | loss 2.2512 | lr 1.0e-03 | 31024 samples/s | 0:41 left`.
///
/// On a terminal it is a line that is rewritten ten times a second; elsewhere a plain line every 30 seconds. A Trainer
/// without a Progress has one that shows itself on terminals only; `ga::Progress{.line = {.to = nullptr}}` shows
/// nothing. The loss is the mean over the epoch so far. Of several processes rank 0 shows itself.
///
/// @note Reads the loss from the device when it is shown.
struct Progress {
  ProgressLineOptions line = {};
  const FitStatus* status = nullptr;           ///< the trainer's
  std::function<std::int64_t()> updates = {};  ///< of the trainer
  std::shared_ptr<ProgressLine> shown = nullptr;
  detail::WeightedMean loss = {};
  double lr = 0;
  bool begun = false;

  template <class Trainer>
  void attach(Trainer& trainer) {
    status = &trainer.status();
    updates = [&trainer] { return trainer.updates(); };
    if (!trainer.is_first()) line.to = nullptr;
    shown = std::make_shared<ProgressLine>(line);
  }
  int fit_scope() {
    begun = false;
    shown->restart();
    return 0;
  }
  void on_epoch_begin(std::int64_t) { loss = {}; }
  void after_window(const Step& step) {
    if (shown->silent()) return;  // on a device, adding up takes time, too
    loss.add(step.loss, step.items);
    lr = step.lr;
  }
  void after_backward(Gradients&) {
    if (!status->running) return;
    if (!std::exchange(begun, true)) begin();
    shown->update(status->fraction(), status->samples, [this] { return text(); });
  }
  void on_epoch_end(std::int64_t) { shown->clear(); }

  /// Says where a fit that was to go on has begun.
  void begin() const;
  std::string text() const;
};

inline void Progress::begin() const {
  const auto& from = status->resumed_from;
  if (!from.empty()) shown->restart(status->fraction().value_or(0), status->samples);
  if (!status->options.resume.empty())
    shown->say(from.empty() ? fmt::format("no state in {} yet: from the beginning", status->options.resume.string())
                            : fmt::format("resumed from {}, in epoch {}", from, status->epoch + 1));
}

inline std::string Progress::text() const {
  auto text = fmt::format("epoch {}", status->epoch + 1);
  const auto& options = status->options;
  if (options.epochs || !options.updates)
    text += fmt::format("/{}", status->epoch - status->epochs + options.epochs.value_or(1));
  text += fmt::format(" | update {}", updates());
  if (loss.weight() > 0) text += fmt::format(" | loss {:.4f} | lr {:.1e}", loss.value().item<double>(), lr);
  if (status->skipped > 0) text += fmt::format(" | {} skipped", status->skipped);
  return text;
}

}  // namespace gradaccum
