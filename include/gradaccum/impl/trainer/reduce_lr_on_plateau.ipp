// SPDX-License-Identifier: Apache-2.0
// Lowers learning rates when validations do not improve.
#pragma once

#include <gradaccum/policies/schedule.hpp>

#include <gradaccum/detail/trainer/any_policy.hpp>

#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE void ReduceLROnPlateau::check() const {
  TORCH_CHECK(factor > 0 && factor < 1, "ReduceLROnPlateau: factor must be in (0, 1), got ", factor);
  TORCH_CHECK(patience >= 0, "ReduceLROnPlateau: patience must be >= 0, got ", patience);
  TORCH_CHECK(threshold >= 0, "ReduceLROnPlateau: threshold must be >= 0, got ", threshold);
  TORCH_CHECK(cooldown >= 0, "ReduceLROnPlateau: cooldown must be >= 0, got ", cooldown);
  TORCH_CHECK(min_lr >= 0, "ReduceLROnPlateau: min_lr must be >= 0, got ", min_lr);
}

/// Computes in the order in which Python does.
GRADACCUM_INLINE bool ReduceLROnPlateau::step(double number, LearningRates& lowered) {
  check();
  const auto which = detail::mode_of("ReduceLROnPlateau", metric, mode);
  const double sign = which == Mode::min ? 1 : -1;
  const double bound = relative ? best * (1 - sign * threshold) : best - sign * threshold;
  const bool better = detail::is_nan(best) ? detail::is_finite(number) || (sign * number < 0 && !detail::is_nan(number))
                                           : sign * number < sign * bound && !detail::is_nan(number);
  if (better) detail::warn_if_last("ReduceLROnPlateau", metric, which, best = number);
  num_bad_epochs = better ? 0 : num_bad_epochs + 1;
  if (cooldown_counter > 0) --cooldown_counter, num_bad_epochs = 0;
  if (num_bad_epochs <= patience) return false;
  lowered.reduce(factor, min_lr, eps);
  cooldown_counter = cooldown;
  num_bad_epochs = 0;
  return true;
}

GRADACCUM_INLINE void ReduceLROnPlateau::begin(TrainerBase& trainer) {
  check();
  trainer.when_built(
      [this, &trainer] { mode = detail::mode_of("ReduceLROnPlateau", metric, mode, &trainer.metrics()); });
}

GRADACCUM_INLINE void ReduceLROnPlateau::on_validation(const Validation& validation) {
  if (const auto number = validation[metric]; number && validation.due) step(*number, rates.value());
}

GRADACCUM_INLINE void ReduceLROnPlateau::state(Archive& archive) {
  archive("best", best);
  archive("num_bad_epochs", num_bad_epochs);
  archive("cooldown_counter", cooldown_counter);
  TORCH_CHECK(num_bad_epochs >= 0 && cooldown_counter >= 0, "ReduceLROnPlateau: the counts of a state must be >= 0");
}

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<ReduceLROnPlateau>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
