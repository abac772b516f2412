// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/save_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/state_directory.hpp>
#include <gradaccum/detail/trainer/stop_signals.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/validation.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace gradaccum {

struct SaveState::Run {
  TrainerBase& trainer;
  bool rehearsed = false;                          // a state could be written
  std::optional<std::filesystem::path> last = {};  // the state that this fit has saved
  bool due = false, finished = false;
  std::optional<double> measured = {};  // of the parameters as they are
  std::vector<double> best = {};        // so far, the best first

  bool rehearse(const std::filesystem::path& directory) const;
  void save(const SaveState& options);
};

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
  run = std::make_shared<Run>(Run{trainer});
}

/// Finds out before hours have gone by whether a state can be written. False while none can be made yet.
GRADACCUM_INLINE bool SaveState::Run::rehearse(const std::filesystem::path& directory) const {
  const auto peers = trainer.peers();
  if (peers && peers->take_each_backward() && trainer.window().micro_batches > 0) return false;
  if (trainer.is_first()) detail::check_is_newest(directory, trainer.updates());
  detail::check_can_be_saved(trainer);
  return true;
}

GRADACCUM_INLINE void SaveState::Run::save(const SaveState& options) {
  auto path = gradaccum::save(options.directory, trainer);
  if (!trainer.is_first()) return;
  detail::StateDirectory states(options.directory);
  if (last && detail::of_one_step(*last, path)) path = states.replace(*last, path);
  last = path;
  if (options.keep_last > 0)
    states.keep_last(options.keep_last, detail::best_states(options.directory, options.keep_best));
}

GRADACCUM_INLINE std::shared_ptr<void> SaveState::fit_scope() {
  run = std::make_shared<Run>(Run{.trainer = run->trainer, .rehearsed = run->rehearsed});
  const bool writes = run->trainer.is_first() && !run->trainer.status().options.smoke;
  if (writes) detail::StateDirectory(directory).sweep();  // though there may be no save
  return on_signals ? std::make_shared<detail::StopSignals>() : nullptr;
}

GRADACCUM_INLINE void SaveState::before_backward(Loss&) { run->finished = false; }
/// The tail of a fit that was stopped closes a window without a backward pass.
GRADACCUM_INLINE void SaveState::after_window(const Step&) { run->finished = false; }

GRADACCUM_INLINE void SaveState::after_step(const Step& step) {
  run->due = run->due || step.update % every_updates == 0;
  run->measured.reset();
}

GRADACCUM_INLINE void SaveState::on_validation(const Validation& validation) {
  const auto number = keep_best > 0 ? validation[metric] : std::nullopt;
  if (!number) return;
  run->measured = number;
  auto& best = run->best;
  const auto count = static_cast<std::size_t>(keep_best);
  const auto place =
      std::find_if(best.begin(), best.end(), [&](double other) { return detail::is_better(*mode, *number, other); });
  if (std::isnan(*number) || (place == best.end() && best.size() >= count)) return;
  best.insert(place, *number);
  if (best.size() > count) best.pop_back();
  run->due = true;
}

GRADACCUM_INLINE void SaveState::state(Archive& archive) {
  using Text = std::optional<std::string>;
  auto& measured = run->measured;
  detail::MeasuredState of{.metric = measured ? Text(metric) : Text(),
                           .better = measured ? Text(*mode == Mode::min ? "min" : "max") : Text(),
                           .number = measured};
  of.state(archive);
  auto bests = run->best;
  bool more = true;
  for (std::size_t i = 0; more; ++i) {
    auto number = i < bests.size() ? std::optional(bests[i]) : std::nullopt;
    archive("best" + std::to_string(i), number);
    more = number.has_value();
    if (archive.loading() && more) i < bests.size() ? void(bests[i] = *number) : bests.push_back(*number);
    if (archive.loading() && !more) bests.resize(std::min(i, bests.size()));
  }
  run->finished = run->finished || archive.loading();
  if (!archive.loading()) return;
  measured = of.number;
  run->best = std::move(bests);
}

GRADACCUM_INLINE void SaveState::at_boundary() {
  auto& trainer = run->trainer;
  const auto& status = trainer.status();
  if (status.options.smoke) return;
  if (!std::exchange(run->rehearsed, true)) run->rehearsed = run->rehearse(directory);
  const int signal = on_signals ? detail::StopSignals::received() : 0;
  if (signal != 0) trainer.interrupt(signal);
  const bool ends = status.done() && (!run->finished || status.signal != 0);  // a signal that all processes know of
  if (run->due || ends) run->save(*this);
  run->due = false;
  run->finished = run->finished || ends;
}

}  // namespace gradaccum
