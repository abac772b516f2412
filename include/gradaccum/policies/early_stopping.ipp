// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/early_stopping.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/validation.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE Mode EarlyStopping::checked_mode() const {
  TORCH_CHECK(patience >= 1, "EarlyStopping: patience must be >= 1, got ", patience);
  TORCH_CHECK(min_delta >= 0, "EarlyStopping: min_delta must be >= 0, got ", min_delta);
  return detail::mode_of("EarlyStopping", metric, mode);
}

GRADACCUM_INLINE bool EarlyStopping::add(double number) {
  const bool better = detail::is_better(checked_mode(), number, best, min_delta);
  if (better) best = number;
  waited = better ? 0 : waited + 1;
  return is_over();
}

GRADACCUM_INLINE std::string EarlyStopping::reason() const {
  return fmt::format("{} was best, {:.6g}, at update {}, {} validation{} ago", metric, best, best_update, waited,
                     waited == 1 ? "" : "s");
}

GRADACCUM_INLINE void EarlyStopping::attach(TrainerBase& trainer) {
  checked_mode();
  trainer.when_built([this, &trainer] { detail::check_is_validated("EarlyStopping", metric, trainer.metrics()); });
  stop = [&trainer](std::string why) { trainer.stop_on_all(std::move(why)); };
}

GRADACCUM_INLINE int EarlyStopping::fit_scope() {
  best = std::numeric_limits<double>::quiet_NaN();
  best_update = waited = 0;
  return 0;
}

GRADACCUM_INLINE void EarlyStopping::on_validation(const Validation& validation) {
  const auto number = validation[metric];
  if (!number) return;  // of another Validate
  const bool over = add(*number);
  if (waited == 0) best_update = validation.update;
  if (over) stop(reason());
}

GRADACCUM_INLINE void EarlyStopping::state(Archive& archive) {
  archive("best", best);
  archive("best_update", best_update);
  archive("waited", waited);
  if (!archive.loading()) return;
  TORCH_CHECK(waited >= 0, "EarlyStopping: waited of a state must be >= 0, got ", waited);
  archive.when_all_fit([this] {
    if (is_over()) stop(reason());
  });
}

}  // namespace gradaccum
