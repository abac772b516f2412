// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/fitted_batches.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_undo.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/detail/fitting/out_of_memory.hpp>
#include <gradaccum/detail/window/peers.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE FittedBatches::FittedBatches(TrainerBase& trainer, FitMemory& memory)
    : trainer_(trainer), parts_(*trainer.parts_), memory_(memory) {}

GRADACCUM_INLINE void FittedBatches::begin() {
  TORCH_CHECK(!parts_.window.steps_in_backward(),
              "FitMemory: must not go with OptimizerInBackward: what is stepped inside of a backward pass cannot be "
              "taken back when that runs out of memory; leave one of the two out");
  TORCH_CHECK(!parts_.window.peers() || !parts_.window.peers()->take_each_backward(),
              "FitMemory: must not go with Shard::gradients: what other processes have got cannot be taken back when "
              "a backward pass runs out of memory; use Shard::optimizer");
  memory_.fitter.find_parts(trainer_.module(), memory_.checkpointed);
}

/// What else ends a `fit` waits for the end of the batch: who goes on from a state begins with the next one.
GRADACCUM_INLINE bool FittedBatches::train(const AnyBatch& batch) {
  const auto rows = batch.rows();
  bool moved = false;
  std::int64_t from = 0;
  do {
    const auto to = end_of_window(batch, from);
    run_window(batch, from, to);
    if (trainer_.closing()) moved = trainer_.close() || moved;
    from = to;
  } while (from < rows && !has_all_updates());
  return moved;
}

GRADACCUM_INLINE bool FittedBatches::has_all_updates() const {
  const auto& status = parts_.status;
  return status.running && status.options.updates && status.updates >= *status.options.updates;
}

/// As many rows at once as training takes, if that is known.
GRADACCUM_INLINE void FittedBatches::for_each_part(const AnyBatch& batch,
                                                   c10::function_ref<void(const AnyBatch&)> use) const {
  if (!batch.is_divisible()) return use(batch);
  const auto rows = batch.rows();
  const auto at_once = memory_.fitter.known_rows(batch.kind()).value_or(rows);
  if (rows <= at_once) return use(batch);
  for (std::int64_t from = 0; from < rows; from += at_once) batch.part(from, std::min(rows, from + at_once), use);
}

/// Where `Accumulate` counts samples, a batch may have those of several windows. None gets, or leaves, too few rows for
/// a micro-batch.
GRADACCUM_INLINE std::int64_t FittedBatches::end_of_window(const AnyBatch& batch, std::int64_t from) const {
  const auto rows = batch.rows();
  const auto left = parts_.batch_size - parts_.record.so_far().samples;
  if (parts_.batch_size == 0 || left <= 0 || batch.samples() != rows) return rows;
  const auto to = from + std::max(left, memory_.min_rows);
  return rows - to < memory_.min_rows ? rows : to;
}

/// What micro-batches of a window that is open already have gathered comes back from a copy, and so does what policies
/// keep that see micro-batches.
GRADACCUM_INLINE void FittedBatches::run_window(const AnyBatch& batch, std::int64_t from, std::int64_t to) {
  auto& window = parts_.window;
  const auto device = trainer_.device();
  const auto kind = batch.kind();
  const auto record = parts_.record;
  const auto status = parts_.status;
  const bool is_open = record.so_far().micro_batches > 0;
  const auto gradients = is_open ? window.bytes() : 0;
  const auto forward = with_memory(device, [&] { return ForwardUndo(trainer_.module().buffers()); });
  std::optional<OpenWindow::Copy> sums;
  if (is_open) sums.emplace(with_memory(device, [&] { return window.copy(); }));
  Archive policies;
  parts_.policies.state_in_window(policies);
  bool begins = true;
  const auto run = [&](std::int64_t first, std::int64_t last) {
    bool of_kind = true;
    batch.part(from + first, from + last, [&](const AnyBatch& part) {
      of_kind = part.kind() == kind;
      trainer_.micro_batch(part, std::exchange(begins, false), /*may_close=*/from + last == to);
    });
    return of_kind;
  };
  const auto undo = [&] {
    forward.put_back();
    Archive seen(policies.values());
    parts_.policies.state_in_window(seen);
    parts_.record = record, parts_.status = status;
    window.discard();
    if (sums) with_memory(device, [&] { window.go_back(*sums); });
    begins = true;
  };
  const auto is_scaled = [&] { return window.scaled(); };
  if (from == to) return static_cast<void>(run(0, 0));
  memory_.fitter.run({memory_.budget, memory_.min_rows},
                     {kind, to - from, device, 2 * gradients, run, undo, is_scaled});
}

}  // namespace gradaccum::detail
