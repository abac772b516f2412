// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/fitted_batch.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_undo.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/detail/fitting/out_of_memory.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/policies/fit_memory.hpp>
#include <gradaccum/trainer_base.hpp>

#include <algorithm>

namespace gradaccum::detail {

GRADACCUM_INLINE FittedBatch::FittedBatch(TrainerBase& trainer, const AnyBatch& batch)
    : trainer_(trainer), parts_(*trainer.parts_), batch_(batch), rows_(batch.rows()) {}

GRADACCUM_INLINE bool FittedBatch::run() {
  bool moved = false;
  std::int64_t from = 0;
  do {
    const auto to = end_of_window(from);
    run_window(from, to);
    if (trainer_.closing()) moved = trainer_.close() || moved;
    from = to;
  } while (from < rows_ && !parts_.status.done());
  return moved;
}

/// Where `Accumulate` counts samples, a batch may have those of several windows.
GRADACCUM_INLINE std::int64_t FittedBatch::end_of_window(std::int64_t from) const {
  if (parts_.batch_size == 0 || batch_.samples() != rows_) return rows_;
  return std::min(rows_, from + std::max<std::int64_t>(parts_.batch_size - parts_.record.so_far().samples, 1));
}

/// What micro-batches of a window that is open already have gathered comes back from a copy, and so does what policies
/// keep that see micro-batches.
GRADACCUM_INLINE void FittedBatch::run_window(std::int64_t from, std::int64_t to) {
  const auto device = trainer_.device();
  const auto record = parts_.record;
  const auto status = parts_.status;
  const bool is_open = record.so_far().micro_batches > 0;
  const auto forward = with_memory(device, [&] { return ForwardUndo(trainer_.module().buffers()); });
  const auto before = with_memory(device, [&] {
    Archive saved;
    if (is_open) saved("window", parts_.window.named(trainer_.module()));
    parts_.policies.state_in_window(saved);
    return saved;
  });
  bool begins = true;
  const auto run = [&](std::int64_t first, std::int64_t last) {
    batch_.part(from + first, from + last,
                [&](const AnyBatch& part) { trainer_.micro_batch(part, begins, /*may_close=*/from + last == to); });
    begins = false;
  };
  const auto undo = [&] {
    parts_.record = record, parts_.status = status;
    parts_.window.discard();
    Archive archive(before.values());
    if (is_open) archive("window", parts_.window.named(trainer_.module()));
    parts_.policies.state_in_window(archive);
    forward.put_back();
    begins = true;
  };
  const auto gradients = is_open ? parts_.window.bytes() : 0;
  if (from == to) return run(0, 0);
  parts_.memory->fitter.run({parts_.memory->budget, parts_.memory->min_rows},
                            {batch_.kind(), to - from, device, gradients, run, undo});
}

}  // namespace gradaccum::detail
