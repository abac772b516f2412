// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/policy.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <type_traits>

namespace gradaccum {

/// Policy: sets the learning rate before each update.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     }, ga::Schedule{ga::lr::Cosine{.peak = 3e-4, .warmup = 100, .total = 5000}});
///     trainer.fit(batches);
///     ga::Schedule halves{[](std::int64_t update) { return 1e-2 * std::pow(0.5, update / 1000); }};
///
/// `rate` is any function of the update's index, which is 0 for the first update. Windows that were skipped do not
/// count. Parameter groups keep the ratios of their rates, see `LearningRates`. Loading a trainer sets the rate anew: a
/// schedule may be changed between two runs.
///
/// @note Does not wait for the device.
template <class Rate>
struct Schedule {
  static_assert(std::is_invocable_r_v<double, Rate&, std::int64_t>,
                "Schedule: the rate must be a function of the update: double(std::int64_t)");
  static constexpr std::string_view name = "schedule";

  Rate rate = {};
  std::optional<LearningRates> rates = {};     ///< not an option, like the next
  std::function<std::int64_t()> updates = {};  ///< the trainer's

  template <class Trainer>
  void attach(Trainer& trainer) {
    updates = [&trainer] { return trainer.updates(); };
    rates.emplace(trainer.optimizer());
    const auto set_first = [this] { rates.value().set(rate(updates())); };
    if constexpr (requires { trainer.when_built(set_first); })
      trainer.when_built(set_first);
    else
      set_first();
  }
  void after_step(const Step& step) { rates.value().set(rate(step.update)); }
  void state(Archive& archive) {
    if (archive.loading()) archive.when_all_fit([this] { rates.value().set(rate(updates())); });
  }
};

template <class Rate>
Schedule(Rate) -> Schedule<Rate>;

}  // namespace gradaccum
