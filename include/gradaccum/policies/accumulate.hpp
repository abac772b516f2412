// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace gradaccum {

/// Policy: several micro-batches an update, which is then the mean over all their items.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     }, ga::Accumulate{.schedule = {{0, 8}, {4, 2}}});      // 8 from epoch 0 on, 2 from epoch 4 on
///     trainer.fit(batches);
///
/// Three ways to say how many: `steps`; by epoch, counted from 0, in `schedule` (before its first epoch, `steps`); or
/// `batch_size`, which closes the window at the micro-batch that brings it to that many samples. A window keeps the
/// number of the epoch that it began in.
struct Accumulate {
  static constexpr std::string_view name = "accumulate";

  std::int64_t steps = 1;                              ///< micro-batches an update, >= 1
  std::map<std::int64_t, std::int64_t> schedule = {};  ///< from that epoch on, so many
  std::int64_t batch_size = 0;  ///< samples an update, as `batch_size(batch)` counts them; 0: steps
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: 16-bit gradients are summed in float32
  const Step* window = nullptr;                      ///< the trainer's: the window so far

  template <class Trainer>
  void attach(Trainer& trainer) {
    check();
    trainer.set_accumulate_in(accumulate_in);
    window = &trainer.window();
  }
  bool ready() const {
    return batch_size > 0 ? window->samples >= batch_size : window->micro_batches >= steps_in(window->epoch);
  }

  /// A training that goes on has the same.
  void state(Archive& archive) const {
    std::string by_epoch;
    for (auto [epoch, number] : schedule) by_epoch += c10::str(epoch, ":", number, " ");
    archive.setting("steps", steps);
    archive.setting("schedule", by_epoch);
    archive.setting("batch_size", batch_size);
  }

  std::int64_t steps_in(std::int64_t epoch) const {
    const auto next = schedule.upper_bound(epoch);
    return next == schedule.begin() ? steps : std::prev(next)->second;
  }

 private:
  void check() const {
    TORCH_CHECK(steps >= 1, "Accumulate: steps must be >= 1, got ", steps);
    TORCH_CHECK(batch_size >= 0, "Accumulate: batch_size must be >= 1, got ", batch_size);
    TORCH_CHECK(batch_size == 0 || (steps == 1 && schedule.empty()),
                "Accumulate: batch_size says when a window is full, and so do steps and schedule; give one of them");
    for (auto [epoch, number] : schedule)
      TORCH_CHECK(epoch >= 0 && number >= 1, "Accumulate: schedule must have epochs >= 0 and steps >= 1, got {", epoch,
                  ", ", number, "}");
  }
};

}  // namespace gradaccum
