// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/progress.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/trainer_base.hpp>

#include <fmt/format.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE void Progress::attach(TrainerBase& trainer) {
  status = &trainer.status();
  updates = [&trainer] { return trainer.updates(); };
  if (!trainer.is_first()) line.to = nullptr;
  shown = std::make_shared<ProgressLine>(line);
}

GRADACCUM_INLINE int Progress::fit_scope() {
  begun = false;
  shown->restart();
  return 0;
}

GRADACCUM_INLINE void Progress::on_epoch_begin(std::int64_t) { loss = {}; }

GRADACCUM_INLINE void Progress::after_window(const Step& step) {
  if (shown->silent()) return;  // on a device, adding up takes time, too
  loss.add(step.loss, step.items);
  lr = step.lr;
}

GRADACCUM_INLINE void Progress::after_backward(Gradients&) {
  if (!status->running) return;
  if (!std::exchange(begun, true)) begin();
  shown->update(status->fraction(), status->samples, [this] { return text(); });
}

GRADACCUM_INLINE void Progress::on_epoch_end(std::int64_t) { shown->clear(); }

GRADACCUM_INLINE void Progress::begin() const {
  const auto& from = status->resumed_from;
  if (!from.empty()) shown->restart(status->fraction().value_or(0), status->samples);
  if (!status->options.resume.empty())
    shown->say(from.empty() ? fmt::format("no state in {} yet: from the beginning", status->options.resume.string())
                            : fmt::format("resumed from {}, in epoch {}", from, status->epoch + 1));
}

GRADACCUM_INLINE std::string Progress::text() const {
  auto text = fmt::format("epoch {}", status->epoch + 1);
  const auto& options = status->options;
  if (options.epochs || !options.has_limit())
    text += fmt::format("/{}", status->epoch - status->epochs + options.epochs.value_or(1));
  text += fmt::format(" | update {}", updates());
  if (loss.weight() > 0) text += fmt::format(" | loss {:.4f} | lr {:.1e}", loss.value().item<double>(), lr);
  if (!status->validations.empty())
    text += fmt::format(" | {}/loss {:.4f}", status->validations.back().name, status->validations.back().found["loss"]);
  if (status->skipped > 0) text += fmt::format(" | {} skipped", status->skipped);
  return text;
}

}  // namespace gradaccum
