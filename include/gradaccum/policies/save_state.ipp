// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/save_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/state_directory.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE void SaveState::attach(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "SaveState: directory must be given");
  TORCH_CHECK(every_updates >= 1, "SaveState: every_updates must be >= 1, got ", every_updates);
  TORCH_CHECK(keep_last >= 0, "SaveState: keep_last must be >= 0, got ", keep_last);
  trainer.check_optimizer_state();
  status = &trainer.status();
  writes = trainer.is_first();
  rehearse = [this, &trainer] {
    if (writes) detail::check_is_newest(directory, trainer.updates());
    detail::check_can_be_saved(trainer);
  };
  save_now = [this, &trainer] {
    auto path = save(directory, trainer);
    if (!writes) return;
    detail::StateDirectory states(directory);
    if (last && detail::of_one_step(*last, path)) path = states.replace(*last, path);
    last = path;
    if (keep_last > 0) states.keep_last(keep_last);
  };
  interrupt = [&trainer](int signal) { trainer.interrupt(signal); };
}

GRADACCUM_INLINE std::optional<detail::StopSignals> SaveState::fit_scope() {
  due = finished = false;
  last.reset();
  if (!status->options.smoke && writes) detail::StateDirectory(directory).sweep();  // though there may be no save
  if (!on_signals) return {};
  return std::optional<detail::StopSignals>(std::in_place);
}

GRADACCUM_INLINE void SaveState::at_boundary() {
  if (status->options.smoke) return;
  if (rehearse) std::exchange(rehearse, {})();  // before hours have gone by
  const int signal = on_signals ? detail::StopSignals::received() : 0;
  if (signal != 0) interrupt(signal);
  const bool ends = status->done() && (!finished || status->signal != 0);  // a signal that all processes know of
  if (due || ends) save_now();
  due = false;
  finished = finished || ends;
}

}  // namespace gradaccum
