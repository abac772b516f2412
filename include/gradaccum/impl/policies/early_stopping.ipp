// SPDX-License-Identifier: Apache-2.0
// Stops a fit whose validations do not improve.
#pragma once

#include <gradaccum/policies/early_stopping.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/progress_line.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

GRADACCUM_INLINE EarlyStopping::Running::Running(EarlyStopping given) : EarlyStopping(std::move(given)) { check(); }

GRADACCUM_INLINE void EarlyStopping::Running::check() const {
  TORCH_CHECK(patience >= 1, "EarlyStopping: patience must be >= 1, got ", patience);
  TORCH_CHECK(min_delta >= 0, "EarlyStopping: min_delta must be >= 0, got ", min_delta);
}

GRADACCUM_INLINE bool EarlyStopping::Running::add(double number) {
  check();
  const auto which = detail::mode_of("EarlyStopping", metric, mode);
  const bool better = detail::is_better(which, number, best_, min_delta);
  if (better) detail::warn_if_last("EarlyStopping", metric, which, best_ = number);
  waited_ = better ? 0 : waited_ + 1;
  return is_over();
}

GRADACCUM_INLINE std::string EarlyStopping::Running::reason() const {
  const auto ago = fmt::format("{} validation{}", waited_, waited_ == 1 ? "" : "s");
  if (detail::is_nan(best_)) return fmt::format("{} was NaN in {}", metric, ago);
  return fmt::format("{} was best, {}, at update {}, {} ago", metric, detail::number_text("%.6g", best_), best_update_,
                     ago);
}

GRADACCUM_INLINE void EarlyStopping::Running::state(Archive& archive) {
  archive("best", best_);
  archive("best_update", best_update_);
  archive("waited", waited_);
  TORCH_CHECK(waited_ >= 0, "EarlyStopping: waited of a state must be >= 0, got ", waited_);
}

struct EarlyStopping::Running::InTrainer {
  static constexpr std::string_view name = EarlyStopping::name;

  Running& stopping;
  TrainerBase& trainer;

  int fit_scope() {
    stopping.best_ = std::numeric_limits<double>::quiet_NaN();
    stopping.best_update_ = stopping.waited_ = 0;
    return 0;
  }

  void on_validation(const Validation& validation) {
    const auto number = validation[stopping.metric];
    if (!number || !validation.due) return;  // another Validate's, or made when the fit ended
    const bool over = stopping.add(*number);
    if (stopping.waited_ == 0) stopping.best_update_ = validation.update;
    if (over) trainer.stop_on_all(stopping.reason());
  }

  void state(Archive& archive) {
    stopping.state(archive);
    if (!archive.loading()) return;
    archive.when_all_fit([this] {
      if (stopping.is_over()) trainer.stop_on_all(stopping.reason());
    });
  }
};

GRADACCUM_INLINE std::shared_ptr<PolicyRun> EarlyStopping::Running::start(TrainerBase& trainer) {
  mode = detail::mode_of("EarlyStopping", metric, mode, &trainer.metrics());
  return detail::started<InTrainer>(*this, trainer);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
