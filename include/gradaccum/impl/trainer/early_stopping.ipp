// SPDX-License-Identifier: Apache-2.0
// Stops a fit whose validations do not improve.
#pragma once

#include <gradaccum/policies/early_stopping.hpp>

#include <gradaccum/detail/trainer/any_policy.hpp>
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

GRADACCUM_INLINE void EarlyStopping::attach(TrainerBase& to) {
  to.when_built([this, &to] {
    mode = detail::mode_of("EarlyStopping", metric, mode, &to.metrics());
    checked_mode();
  });
  trainer = &to;
}

GRADACCUM_INLINE int EarlyStopping::fit_scope() {
  best = std::numeric_limits<double>::quiet_NaN();
  best_update = waited = 0;
  return 0;
}

GRADACCUM_INLINE void EarlyStopping::on_validation(const Validation& validation) {
  const auto number = validation[metric];
  if (!number || !validation.due) return;  // another Validate's, or made when the fit ended
  const bool over = add(*number);
  if (waited == 0) best_update = validation.update;
  if (over && trainer) trainer->stop_on_all(reason());
}

GRADACCUM_INLINE void EarlyStopping::state(Archive& archive) {
  archive("best", best);
  archive("best_update", best_update);
  archive("waited", waited);
  if (!archive.loading()) return;
  TORCH_CHECK(waited >= 0, "EarlyStopping: waited of a state must be >= 0, got ", waited);
  archive.when_all_fit([this] {
    if (is_over() && trainer) trainer->stop_on_all(reason());
  });
}

}  // namespace gradaccum

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
template class PolicyOf<EarlyStopping>;
}  // namespace gradaccum::detail
#endif

#undef GRADACCUM_INLINE
