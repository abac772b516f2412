// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>

namespace gradaccum {

/// Policy: several micro-batches an update, which is then the mean over all their items.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.schedule = {{0, 8}, {4, 2}}});
///     trainer.fit(batches);                                  // 8 from epoch 0 on, 2 from epoch 4 on
///
/// Three ways to say how many: `steps`; by epoch, counted from 0, in `schedule` (before its first epoch, `steps`); or
/// `batch_size`, which closes the window at the micro-batch that brings it to that many samples. A window keeps the
/// number of the epoch that it began in. With `FitMemory` micro-batches are counted as the batches that they are parts
/// of, and `batch_size` is met to the sample.
struct Accumulate {
  static constexpr std::string_view name = "accumulate";

  Count steps = 1;                                     ///< micro-batches an update, >= 1
  std::map<std::int64_t, std::int64_t> schedule = {};  ///< from that epoch on, so many
  Count batch_size = 0;  ///< samples an update, as `batch_size(batch)` counts them; 0: steps
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: 16-bit gradients are summed in float32
  const Step* window = nullptr;                      ///< the trainer's: the window so far

  void attach(TrainerBase& trainer);
  bool ready() const {
    return batch_size > 0 ? window->samples >= batch_size : window->batches >= steps_in(window->epoch);
  }

  /// A training that goes on has the same.
  void state(Archive& archive) const;

  std::int64_t steps_in(std::int64_t epoch) const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/accumulate.ipp>
#endif
