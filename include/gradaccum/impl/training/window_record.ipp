// SPDX-License-Identifier: Apache-2.0
// Counts a Trainer's open window, and detects losses that are not finite.
#pragma once

#include <gradaccum/detail/training/window_record.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <csignal>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool WindowRecord::add_loss(const Loss& loss, FitState& fit, std::int64_t update) {
  loss.check();
  read_mean_.reset();
  if (loss.items == 0) return true;  // a mean over nothing is often NaN
  const auto on_nan = fit.options.on_nan;
  const Place place{fit.batch - 1, fit.epoch, update + 1};
  if (on_nan == OnNan::skip || (on_nan == OnNan::stop && loss.mean.device().is_cpu())) {
    const auto number = loss.mean.item<double>();
    if (!detail::is_finite(number)) {
      if (on_nan == OnNan::stop) stop(number, place);
      if (fit.nan_batches++ == 0) fit.first_nan = place.text();
      ++left_out_;
      return false;
    }
    mean_.add(number, loss.items);
  } else {
    if (on_nan == OnNan::stop) to_check_.emplace_back(loss.mean.detach(), place);
    mean_.add(loss.mean, loss.items);
  }
  step_.items += loss.items;
  return true;
}

GRADACCUM_INLINE void WindowRecord::check_losses(const at::Tensor& mean) {
  if (mean.defined() && !detail::is_finite(*(read_mean_ = mean.item<double>())))
    for (auto& [loss, place] : to_check_)
      if (const auto number = loss.item<double>(); !detail::is_finite(number)) stop(number, place);
  to_check_.clear();
}

/// Names all batches of a window, because its gradients are checked only once, as a sum.
GRADACCUM_INLINE std::string WindowRecord::place_of_window(const FitState& fit, std::int64_t update) const {
  auto place = Place{fit.batch - 1, fit.epoch, update + 1}.text();
  if (step_.batches > 1) place = plain_text("one of the ", step_.batches, " batches up to ", place);
  if (fit.together) place += ", of this process or of another";
  return place;
}

GRADACCUM_INLINE void WindowRecord::count_rejected(const std::string& why, FitState& fit, std::int64_t update) const {
  if (fit.rejected++ > 0) return;
  fit.first_rejected = place_of_window(fit, update) + (why.empty() ? "" : ": " + why);
}

GRADACCUM_INLINE void WindowRecord::leave_out(const std::string& parameter, FitState& fit, std::int64_t update) {
  const auto place = place_of_window(fit, update);
  TORCH_CHECK(fit.options.on_nan == OnNan::skip, "Trainer: the gradients must be finite, got NaN or infinity",
              parameter, ", for ", place,
              ", whose loss is finite; look for functions without a derivative at 0, such as sqrt and norm, or skip "
              "such windows: {.on_nan = ga::OnNan::skip}");
  if (fit.nan_batches == 0) fit.first_nan = place;
  fit.nan_batches += std::max<std::int64_t>(step_.batches - std::exchange(left_out_, step_.batches), 0);
}

/// Reads losses on a device first, so that a non-finite one throws and is not saved.
GRADACCUM_INLINE void WindowRecord::state(Archive& archive) {
  TORCH_CHECK(!in_hand_ && !being_closed_,
              "Trainer: must be saved and loaded between micro-batches, got a call inside one, which some policies "
              "have not seen yet; use SaveState, or a policy with at_boundary");
  if (archive.loading()) restart();
  check_losses(unread_mean());
  archive("epoch", step_.epoch);
  archive("micro_batches", step_.micro_batches);
  auto batches = step_.batches == step_.micro_batches ? std::nullopt : std::optional(step_.batches);
  archive("batches", batches);
  step_.batches = batches.value_or(step_.micro_batches);
  archive("samples", step_.samples);
  archive("items", step_.items);
  archive("loss", mean_);
}

GRADACCUM_INLINE WindowTotals WindowRecord::totals(const FitState& fit) const {
  WindowTotals own;
  own.samples = static_cast<double>(step_.samples);
  own.micro_batches = static_cast<double>(step_.micro_batches);
  if (mean_.weight() > 0) own.loss = (read_mean_ ? *read_mean_ : mean_.value().item<double>()) * mean_.weight();
  own.stop = fit.wants_stop ? 1 : 0;
  own.signal = fit.wants_signal != 0 ? 1 : 0;
  own.save = fit.wants_save ? 1 : 0;
  own.flops = fit.unsent_flops;
  return own;
}

GRADACCUM_INLINE void WindowRecord::take_totals(const WindowTotals& own, const WindowTotals& all, FitState& fit) {
  if (all.stop > 0) fit.stopped = true;
  if (all.signal > 0) fit.interrupt_now(fit.wants_signal != 0 ? fit.wants_signal : SIGTERM);
  if (all.save > 0) fit.saves = true;
  fit.take_flops(own.flops, all.flops);
  if (all.active == 0) {  // an epoch is over on all ranks, and no window closes
    fit.trained = fit.trained || all.weight > 0;
    return;
  }
  if (own.micro_batches == 0) step_.epoch = fit.epoch;
  step_.samples = static_cast<std::int64_t>(all.samples);
  step_.micro_batches = static_cast<std::int64_t>(all.micro_batches);
  fit.samples += static_cast<std::int64_t>(all.samples - own.samples);
  fit.add_items(all.weight - own.weight);
  mean_ = {};
  if (all.weight > 0) mean_.add(all.loss / all.weight, all.weight);
}

GRADACCUM_INLINE Step WindowRecord::finish(const Gradients& gradients, StepResult result, std::int64_t updates,
                                           double lr) {
  auto step = step_;
  step.update = updates;
  step.moved = result;
  step.rejected = result == StepResult::rejected;
  step.overflowed = overflow_is_awaited && gradients.judged() && Gradients(gradients).overflowed();
  step.items = gradients.items();
  step.loss = mean_.value();
  step.grad_norm = gradients.norm_before_clipping();
  step.lr = lr;
  restart();
  return step;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
