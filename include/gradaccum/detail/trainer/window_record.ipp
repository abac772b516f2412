// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/window_record.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <csignal>

namespace gradaccum::detail {

GRADACCUM_INLINE void WindowRecord::check_none_in_hand() const {
  TORCH_CHECK(!in_hand_, "Trainer: step() or flush() inside of a micro-batch, in the objective say");
}

GRADACCUM_INLINE void WindowRecord::begin_micro_batch(std::int64_t samples, bool begins, FitStatus& status) {
  check_none_in_hand();
  in_hand_ = true;
  if (step_.micro_batches++ == 0) step_.epoch = status.epoch;
  step_.batches += begins;
  step_.samples += samples;
  status.samples += samples;
}

GRADACCUM_INLINE void WindowRecord::prepare(c10::function_ref<void()> scale) {
  if (std::exchange(prepared_, true)) return;
  scale();
  check_losses();
}

GRADACCUM_INLINE void WindowRecord::restart() {
  step_ = {};
  mean_ = {};
  to_check_.clear();
  in_hand_ = closing_ = prepared_ = false;
}

GRADACCUM_INLINE std::string WindowRecord::Place::text() const {
  return c10::str("batch ", batch, " of epoch ", epoch, " (both counted from 0), in update ", update);
}

GRADACCUM_INLINE void WindowRecord::stop(double loss, const Place& place) {
  TORCH_CHECK(false, "Trainer: the loss must be finite, got ", loss, " for ", place.text(),
              "; look at that batch and at the learning rate, or leave such batches out: {.on_nan = "
              "ga::OnNan::skip}");
}

GRADACCUM_INLINE bool WindowRecord::take(const Loss& loss, FitStatus& status, std::int64_t update) {
  loss.check();
  if (loss.items == 0) return true;  // a mean over nothing is often NaN
  const auto on_nan = status.options.on_nan;
  const Place place{status.batch - 1, status.epoch, update + 1};
  if (on_nan == OnNan::ignore || (on_nan == OnNan::stop && !loss.mean.device().is_cpu())) {
    if (on_nan == OnNan::stop) to_check_.emplace_back(loss.mean.detach(), place);
    mean_.add(loss.mean, loss.items);
    step_.items += loss.items;
    return true;
  }
  const auto number = loss.mean.item<double>();
  if (std::isfinite(number)) {
    mean_.add(number, loss.items);
    step_.items += loss.items;
    return true;
  }
  if (on_nan == OnNan::stop) stop(number, place);
  if (status.nan_batches++ == 0) status.first_nan = place.text();
  return false;
}

GRADACCUM_INLINE void WindowRecord::check_losses() const {
  if (to_check_.empty() || std::isfinite(mean_.value().item<double>())) return;
  for (auto& [loss, place] : to_check_)
    if (const auto number = loss.item<double>(); !std::isfinite(number)) stop(number, place);
}

/// Losses on a device are looked at before they are saved.
GRADACCUM_INLINE void WindowRecord::state(Archive& archive) {
  TORCH_CHECK(
      !in_hand_ && !being_closed_,
      "Trainer: must be saved and loaded between micro-batches, got a call from "
      "within a micro-batch, of which some policies do not know yet; use SaveState, or a policy with at_boundary");
  if (archive.loading()) restart();
  check_losses();
  to_check_.clear();
  archive("epoch", step_.epoch);
  archive("micro_batches", step_.micro_batches);
  auto batches = step_.batches == step_.micro_batches ? std::nullopt : std::optional(step_.batches);
  archive("batches", batches);
  step_.batches = batches.value_or(step_.micro_batches);
  archive("samples", step_.samples);
  archive("items", step_.items);
  archive("loss", mean_);
}

GRADACCUM_INLINE WindowTotals WindowRecord::totals(const FitStatus& status) const {
  WindowTotals own;
  own.samples = static_cast<double>(step_.samples);
  own.micro_batches = static_cast<double>(step_.micro_batches);
  if (mean_.weight() > 0) own.loss = mean_.value().item<double>() * mean_.weight();
  own.stop = status.wants_stop ? 1 : 0;
  own.signal = status.wants_signal != 0 ? 1 : 0;
  return own;
}

GRADACCUM_INLINE void WindowRecord::take_totals(const WindowTotals& own, const WindowTotals& all, FitStatus& status) {
  if (all.stop > 0) status.stopped = true;
  if (all.signal > 0) status.signal = status.wants_signal != 0 ? status.wants_signal : SIGTERM;
  if (all.active == 0) {  // an epoch is over on all ranks, and no window closes
    status.trained = status.trained || all.weight > 0;
    return;
  }
  if (own.micro_batches == 0) step_.epoch = status.epoch;
  step_.samples = static_cast<std::int64_t>(all.samples);
  step_.micro_batches = static_cast<std::int64_t>(all.micro_batches);
  status.samples += static_cast<std::int64_t>(all.samples - own.samples);
  mean_ = {};
  if (all.weight > 0) mean_.add(all.loss / all.weight, all.weight);
}

GRADACCUM_INLINE Step WindowRecord::finish(const Gradients& gradients, bool moved, std::int64_t updates, double lr) {
  auto step = step_;
  step.update = updates;
  step.moved = moved;
  step.overflowed = gradients.judged() && Gradients(gradients).overflowed();
  step.items = gradients.items();
  step.loss = mean_.value();
  step.grad_norm = gradients.norm_before_clipping();
  step.lr = lr;
  restart();
  return step;
}

}  // namespace gradaccum::detail
