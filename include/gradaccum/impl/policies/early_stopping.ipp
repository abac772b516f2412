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

GRADACCUM_INLINE Mode EarlyStopping::checked_mode() const {
  TORCH_CHECK(patience >= 1, "EarlyStopping: patience must be >= 1, got ", patience);
  TORCH_CHECK(min_delta >= 0, "EarlyStopping: min_delta must be >= 0, got ", min_delta);
  return detail::mode_of("EarlyStopping", metric, mode);
}

GRADACCUM_INLINE bool EarlyStopping::add(double number) {
  const auto which = checked_mode();
  const bool better = detail::is_better(which, number, best, min_delta);
  if (better) detail::warn_if_last("EarlyStopping", metric, which, best = number);
  waited = better ? 0 : waited + 1;
  return is_over();
}

GRADACCUM_INLINE std::string EarlyStopping::reason() const {
  const auto ago = fmt::format("{} validation{}", waited, waited == 1 ? "" : "s");
  if (detail::is_nan(best)) return fmt::format("{} was NaN in {}", metric, ago);
  return fmt::format("{} was best, {}, at update {}, {} ago", metric, detail::number_text("%.6g", best), best_update,
                     ago);
}

GRADACCUM_INLINE void EarlyStopping::state(Archive& archive) {
  archive("best", best);
  archive("best_update", best_update);
  archive("waited", waited);
  TORCH_CHECK(waited >= 0, "EarlyStopping: waited of a state must be >= 0, got ", waited);
}

namespace detail {

struct EarlyStoppingRun {
  static constexpr std::string_view name = EarlyStopping::name;

  EarlyStopping& stopping;
  TrainerBase& trainer;

  int fit_scope() {
    stopping.best = std::numeric_limits<double>::quiet_NaN();
    stopping.best_update = stopping.waited = 0;
    return 0;
  }

  void on_validation(const Validation& validation) {
    const auto number = validation[stopping.metric];
    if (!number || !validation.due) return;  // another Validate's, or made when the fit ended
    const bool over = stopping.add(*number);
    if (stopping.waited == 0) stopping.best_update = validation.update;
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

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> EarlyStopping::start(TrainerBase& trainer) {
  mode = detail::mode_of("EarlyStopping", metric, mode, &trainer.metrics());
  checked_mode();
  return detail::started<detail::EarlyStoppingRun>(*this, trainer);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
