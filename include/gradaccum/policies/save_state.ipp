// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/save_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/state_directory.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/validation.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace gradaccum {

GRADACCUM_INLINE void SaveState::attach(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "SaveState: directory must be given");
  TORCH_CHECK(every_updates >= 1, "SaveState: every_updates must be >= 1, got ", every_updates);
  TORCH_CHECK(keep_last >= 0, "SaveState: keep_last must be >= 0, got ", keep_last);
  TORCH_CHECK(keep_best >= 0, "SaveState: keep_best must be >= 0, got ", keep_best);
  if (keep_best > 0) {
    mode = detail::mode_of("SaveState", metric, mode);
    trainer.when_built([this, &trainer] { detail::check_is_validated("SaveState", metric, trainer.metrics()); });
  }
  trainer.check_optimizer_state();
  status = &trainer.status();
  writes = trainer.is_first();
  rehearse = [this, &trainer] {
    const auto peers = trainer.peers();
    if (peers && peers->take_each_backward() && trainer.window().micro_batches > 0) return false;  // not a state, yet
    if (writes) detail::check_is_newest(directory, trainer.updates());
    detail::check_can_be_saved(trainer);
    return true;
  };
  save_now = [this, &trainer] {
    auto path = save(directory, trainer);
    if (!writes) return;
    detail::StateDirectory states(directory);
    if (last && detail::of_one_step(*last, path)) path = states.replace(*last, path);
    last = path;
    if (keep_last > 0) states.keep_last(keep_last, detail::best_states(directory, keep_best));
  };
  interrupt = [&trainer](int signal) { trainer.interrupt(signal); };
}

GRADACCUM_INLINE std::optional<detail::StopSignals> SaveState::fit_scope() {
  due = finished = false;
  last.reset();
  measured.reset();
  best.clear();
  if (!status->options.smoke && writes) detail::StateDirectory(directory).sweep();  // though there may be no save
  if (!on_signals) return {};
  return std::optional<detail::StopSignals>(std::in_place);
}

GRADACCUM_INLINE void SaveState::after_step(const Step& step) {
  due = due || step.update % every_updates == 0;
  measured.reset();
}

GRADACCUM_INLINE void SaveState::on_validation(const Validation& validation) {
  const auto number = keep_best > 0 ? validation[metric] : std::nullopt;
  if (!number) return;
  measured = number;
  const auto count = static_cast<std::size_t>(keep_best);
  const auto place =
      std::find_if(best.begin(), best.end(), [&](double other) { return detail::is_better(*mode, *number, other); });
  if (std::isnan(*number) || (place == best.end() && best.size() >= count)) return;
  best.insert(place, *number);
  if (best.size() > count) best.pop_back();
  due = true;
}

GRADACCUM_INLINE void SaveState::state(Archive& archive) {
  using Text = std::optional<std::string>;
  detail::MeasuredState of{.metric = measured ? Text(metric) : Text(),
                           .better = measured ? Text(*mode == Mode::min ? "min" : "max") : Text(),
                           .number = measured};
  of.state(archive);
  auto bests = best;
  bool more = true;
  for (std::size_t i = 0; more; ++i) {
    auto number = i < bests.size() ? std::optional(bests[i]) : std::nullopt;
    archive("best" + std::to_string(i), number);
    more = number.has_value();
    if (archive.loading() && more) i < bests.size() ? void(bests[i] = *number) : bests.push_back(*number);
    if (archive.loading() && !more) bests.resize(std::min(i, bests.size()));
  }
  finished = finished || archive.loading();
  if (!archive.loading()) return;
  measured = of.number;
  best = std::move(bests);
}

GRADACCUM_INLINE void SaveState::at_boundary() {
  if (status->options.smoke) return;
  if (const auto check = std::exchange(rehearse, {}); check && !check()) rehearse = check;  // before hours have gone by
  const int signal = on_signals ? detail::StopSignals::received() : 0;
  if (signal != 0) interrupt(signal);
  const bool ends = status->done() && (!finished || status->signal != 0);  // a signal that all processes know of
  if (due || ends) save_now();
  due = false;
  finished = finished || ends;
}

}  // namespace gradaccum
