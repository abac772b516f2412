// SPDX-License-Identifier: Apache-2.0
// Shows the progress of a fit on a terminal.
#pragma once

#include <gradaccum/policies/progress.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/trainer_base.hpp>

#include <fmt/format.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

struct ProgressRun {
  ProgressRun(const TrainerBase& its_trainer, const ProgressLineOptions& its_line)
      : trainer(its_trainer), progress(its_trainer.progress()), line(its_line), shown(std::in_place, line) {}

  const TrainerBase& trainer;
  const FitProgress& progress;  // the trainer's
  ProgressLineOptions line;
  std::optional<ProgressLine> shown;  // of this fit
  WeightedMean loss = {};
  double lr = 0;
  bool begun = false;

  /// Shows whether and where the fit was resumed.
  void begin() {
    const auto& from = progress.resumed_from;
    if (!from.empty()) shown->restart(progress.fraction().value_or(0), count(), progress.flops());
    if (!progress.options.resume.empty())
      shown->say(from.empty() ? fmt::format("no state in {} yet: from the beginning", progress.options.resume.string())
                              : fmt::format("resumed from {}, in epoch {}", from, progress.epoch + 1));
  }

  std::string text() const {
    auto text = fmt::format("epoch {}", progress.epoch + 1);
    const auto& options = progress.options;
    if (options.epochs || !options.has_limit())
      text += fmt::format("/{}", progress.epoch - progress.epochs + options.epochs.value_or(1));
    text += fmt::format(" | update {}", trainer.updates());
    if (loss.weight() > 0)
      text += number_text(" | loss %.4f", loss.value().item<double>()) + number_text(" | lr %.1e", lr);
    if (!progress.validations.empty())
      text += " | " + progress.validations.back().name +
              number_text("/loss %.4f", progress.validations.back().found["loss"]);
    if (progress.skipped > 0) text += fmt::format(" | {} skipped", progress.skipped);
    return text;
  }

  std::int64_t count() const {
    return progress.options.unit.empty() ? progress.samples : static_cast<std::int64_t>(progress.items());
  }

  int fit_scope() {
    begun = false;
    auto of_fit = line;
    if (!progress.options.unit.empty()) of_fit.unit = progress.options.unit;
    of_fit.peak_flops = progress.peak_flops();
    shown.emplace(of_fit);
    return 0;
  }
  void on_epoch_begin(std::int64_t) { loss = {}; }
  void after_window(const Step& step) {
    if (shown->silent()) return;  // on a device, even a sum takes time
    loss.add(step.loss, step.items);
    lr = step.lr;
  }
  void after_backward(Gradients&) {
    if (!progress.running) return;
    if (!std::exchange(begun, true)) begin();
    shown->update(
        progress.fraction(), count(), [this] { return text(); }, progress.flops());
  }
  void on_epoch_end(std::int64_t) { shown->clear(); }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> Progress::start(TrainerBase& trainer) {
  auto shown = line;
  if (!trainer.is_first()) shown.to = nullptr;
  return detail::started<detail::ProgressRun>(trainer, shown);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
