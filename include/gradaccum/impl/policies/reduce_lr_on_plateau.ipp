// SPDX-License-Identifier: Apache-2.0
// Lowers learning rates when validations do not improve.
#pragma once

#include <gradaccum/policies/schedule.hpp>

#include <c10/util/Exception.h>
#include <gradaccum/detail/training/any_policy.hpp>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE ReduceLROnPlateau::Running::Running(ReduceLROnPlateau given) : ReduceLROnPlateau(std::move(given)) {
  check();
}

GRADACCUM_INLINE void ReduceLROnPlateau::Running::check() const {
  TORCH_CHECK(factor > 0 && factor < 1, "ReduceLROnPlateau: factor must be in (0, 1), got ", factor);
  TORCH_CHECK(patience >= 0, "ReduceLROnPlateau: patience must be >= 0, got ", patience);
  TORCH_CHECK(threshold >= 0, "ReduceLROnPlateau: threshold must be >= 0, got ", threshold);
  TORCH_CHECK(cooldown >= 0, "ReduceLROnPlateau: cooldown must be >= 0, got ", cooldown);
  TORCH_CHECK(min_lr >= 0, "ReduceLROnPlateau: min_lr must be >= 0, got ", min_lr);
}

/// Computes in the order in which Python does.
GRADACCUM_INLINE bool ReduceLROnPlateau::Running::step(double number, LearningRates& lowered) {
  check();
  const auto which = detail::mode_of("ReduceLROnPlateau", metric, mode);
  const double sign = which == Mode::min ? 1 : -1;
  const double bound = relative ? best_ * (1 - sign * threshold) : best_ - sign * threshold;
  const bool better = detail::is_nan(best_)
                          ? detail::is_finite(number) || (sign * number < 0 && !detail::is_nan(number))
                          : sign * number < sign * bound && !detail::is_nan(number);
  if (better) detail::warn_if_last("ReduceLROnPlateau", metric, which, best_ = number);
  num_bad_epochs_ = better ? 0 : num_bad_epochs_ + 1;
  if (cooldown_counter_ > 0) --cooldown_counter_, num_bad_epochs_ = 0;
  if (num_bad_epochs_ <= patience) return false;
  lowered.reduce(factor, min_lr, eps);
  cooldown_counter_ = cooldown;
  num_bad_epochs_ = 0;
  return true;
}

GRADACCUM_INLINE void ReduceLROnPlateau::Running::state(Archive& archive) {
  archive("best", best_);
  archive("num_bad_epochs", num_bad_epochs_);
  archive("cooldown_counter", cooldown_counter_);
  TORCH_CHECK(num_bad_epochs_ >= 0 && cooldown_counter_ >= 0, "ReduceLROnPlateau: the counts of a state must be >= 0");
}

namespace detail {

struct PlateauRun {
  static constexpr std::string_view name = ReduceLROnPlateau::name;

  ReduceLROnPlateau::Running& plateau;
  LearningRates rates;

  void on_validation(const Validation& validation) {
    if (const auto number = validation[plateau.metric]; number && validation.due) plateau.step(*number, rates);
  }
  void state(Archive& archive) { plateau.state(archive); }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> ReduceLROnPlateau::Running::start(TrainerBase& trainer) {
  mode = detail::mode_of("ReduceLROnPlateau", metric, mode, &trainer.metrics());
  return detail::started<detail::PlateauRun>(*this, trainer.learning_rates());
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
