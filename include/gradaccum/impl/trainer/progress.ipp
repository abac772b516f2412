// SPDX-License-Identifier: Apache-2.0
// Shows the progress of a fit on a terminal.
#pragma once

#include <gradaccum/policies/progress.hpp>

#include <gradaccum/detail/trainer/any_policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <fmt/format.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

struct Progress::Run {
  const TrainerBase& trainer;
  const FitStatus& status;  // the trainer's
  ProgressLine shown;
  detail::WeightedMean loss = {};
  double lr = 0;
  bool begun = false;

  /// Shows whether and where the fit was resumed.
  void begin() {
    const auto& from = status.resumed_from;
    if (!from.empty()) shown.restart(status.fraction().value_or(0), status.samples);
    if (!status.options.resume.empty())
      shown.say(from.empty() ? fmt::format("no state in {} yet: from the beginning", status.options.resume.string())
                             : fmt::format("resumed from {}, in epoch {}", from, status.epoch + 1));
  }

  std::string text() const {
    auto text = fmt::format("epoch {}", status.epoch + 1);
    const auto& options = status.options;
    if (options.epochs || !options.has_limit())
      text += fmt::format("/{}", status.epoch - status.epochs + options.epochs.value_or(1));
    text += fmt::format(" | update {}", trainer.updates());
    if (loss.weight() > 0)
      text += detail::number_text(" | loss %.4f", loss.value().item<double>()) + detail::number_text(" | lr %.1e", lr);
    if (!status.validations.empty())
      text += " | " + status.validations.back().name +
              detail::number_text("/loss %.4f", status.validations.back().found["loss"]);
    if (status.skipped > 0) text += fmt::format(" | {} skipped", status.skipped);
    return text;
  }
};

GRADACCUM_INLINE void Progress::attach(TrainerBase& trainer) {
  if (!trainer.is_first()) line.to = nullptr;
  run.reset(new Run{trainer, trainer.status(), ProgressLine(line)});
}

GRADACCUM_INLINE int Progress::fit_scope() {
  run->begun = false;
  run->shown.restart();
  return 0;
}

GRADACCUM_INLINE void Progress::on_epoch_begin(std::int64_t) { run->loss = {}; }

GRADACCUM_INLINE void Progress::after_window(const Step& step) {
  if (run->shown.silent()) return;  // on a device, even a sum takes time
  run->loss.add(step.loss, step.items);
  run->lr = step.lr;
}

GRADACCUM_INLINE void Progress::after_backward(Gradients&) {
  const auto& status = run->status;
  if (!status.running) return;
  if (!std::exchange(run->begun, true)) run->begin();
  run->shown.update(status.fraction(), status.samples, [this] { return run->text(); });
}

GRADACCUM_INLINE void Progress::on_epoch_end(std::int64_t) { run->shown.clear(); }

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<Progress>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
