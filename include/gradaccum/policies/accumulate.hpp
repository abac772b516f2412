// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>

namespace gradaccum {

/// Policy: accumulates several micro-batches per update, which uses the mean over all their items.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.schedule = {{0, 8}, {4, 2}}});
///     trainer.fit(batches);                                  // 8 from epoch 0 on, 2 from epoch 4 on
///
/// The number per update is `steps`, or per epoch, counted from 0, in `schedule` (`steps` before its first epoch); or
/// `batch_size` closes a window at the micro-batch with which it reaches that many samples. A window keeps the number
/// of the epoch that it began in. With `FitMemory`, whole batches are counted, not their parts, and a window has
/// `batch_size` samples unless the rest would be smaller than `min_rows`.
struct Accumulate {
  static constexpr std::string_view name = "accumulate";

  Count steps = 1;                                     ///< micro-batches per update, >= 1
  std::map<std::int64_t, std::int64_t> schedule = {};  ///< steps by the epoch from which on they apply
  Count batch_size = 0;                                ///< samples per update, by `batch_size(batch)`; 0: use steps
  std::optional<at::ScalarType> accumulate_in = {};    ///< kFloat: 16-bit gradients are summed in float32

  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/accumulate.ipp>
#endif
