// SPDX-License-Identifier: Apache-2.0
// Connects the search for rows that fit into memory to a Trainer, or to a hand-written loop.
#pragma once

#include <gradaccum/policies/fit_memory.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// Divides a Trainer's batches into micro-batches that fit into memory; see `FitMemory`.
class FittedBatches final : public BatchDivider {
 public:
  FittedBatches(TrainerBase& trainer, const FitMemory::Running& memory) : trainer_(trainer), memory_(memory) {}

  /// Divides a batch of an evaluation into parts of as many rows as in training, if that number is known.
  void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const override {
    if (!batch.is_divisible()) return use(batch);
    const auto rows = batch.rows();
    const auto at_once = memory_.fitter_->known_rows(batch.kind()).value_or(rows);
    if (rows <= at_once) return use(batch);
    for (std::int64_t from = 0; from < rows; from += at_once) batch.part(from, std::min(rows, from + at_once), use);
  }

  /// Returns the row where the current window ends: a batch may span several if `Accumulate` counts samples. Neither
  /// this window's part of the batch nor the rest has fewer than `min_rows`.
  std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const override {
    const auto rows = batch.rows();
    const auto missing = loop().missing_samples();
    if (!missing || batch.samples() != rows) return rows;
    const auto to = from + std::max(*missing, memory_.min_rows);
    return rows - to < memory_.min_rows ? rows : to;
  }

  /// Trains with rows of a batch. After running out of memory, restores the sums of the open window and the state of
  /// policies that see micro-batches from copies.
  void run(const AnyBatch& batch, std::int64_t from, std::int64_t to) override {
    const auto device = trainer_.device();
    const auto kind = batch.kind();
    const auto gradients = loop().is_window_begun() ? loop().window().bytes() : 0;
    const auto forward = with_memory(device, [&] { return ForwardUndo(trainer_.module().buffers()); });
    const auto window = with_memory(device, [&] { return loop().copy_window(); });
    bool begins = true;
    const auto run_rows = [&](std::int64_t first, std::int64_t last) {
      bool of_kind = true;
      batch.part(from + first, from + last, [&](const AnyBatch& part) {
        of_kind = part.kind() == kind;
        loop().micro_batch(part, std::exchange(begins, false), /*may_close=*/from + last == to);
      });
      return of_kind;
    };
    const auto undo = [&] {
      forward.put_back();
      with_memory(device, [&] { loop().go_back(window); });
      begins = true;
    };
    if (from == to) return static_cast<void>(run_rows(0, 0));
    memory_.fitter_->run({memory_.budget, memory_.min_rows}, {kind, to - from, device, 2 * gradients, run_rows, undo,
                                                              [&] { return loop().window().scaled(); }});
  }

 private:
  Loop& loop() const { return Loop::of(trainer_); }

  TrainerBase& trainer_;
  const FitMemory::Running& memory_;
};

}  // namespace detail

GRADACCUM_INLINE FitMemory::Running::Running(FitMemory given)
    : FitMemory(std::move(given)), fitter_(std::make_shared<detail::MemoryFitter>()) {}

GRADACCUM_INLINE void FitMemory::Running::attach(TrainerBase& trainer) {
  trainer.when_built([this, &trainer] {
    TORCH_CHECK(!trainer.steps_in_backward(),
                "FitMemory: must not be combined with OptimizerInBackward: steps during a backward pass cannot be "
                "undone when it runs out of memory; use only one of the two");
    TORCH_CHECK(!detail::Loop::of(trainer).peers() || !detail::Loop::of(trainer).peers()->take_each_backward(),
                "FitMemory: must not be combined with Shard::gradients: gradients that were sent to other ranks cannot "
                "be taken back when a backward pass runs out of memory; use Shard::optimizer");
    fitter_->find_parts(trainer.module(), checkpointed);
  });
  detail::Loop::of(trainer).divide_batches_by(std::make_unique<detail::FittedBatches>(trainer, *this));
}

GRADACCUM_INLINE void FitMemory::Running::state(Archive& archive) {
  archive.setting("budget", budget);
  archive.setting("min_rows", min_rows);
  fitter_->state(archive);
}

GRADACCUM_INLINE const MemoryPlan& FitMemory::Running::plan() const { return fitter_->plan(); }

/// Leaves the last micro-batch incomplete, so that `step()` completes it and the window, as after any backward().
GRADACCUM_INLINE Loss FitMemory::Running::backward(Accumulator& optimizer, torch::nn::Module& module,
                                                   const detail::AnyBatch& batch) {
  auto& window = *optimizer.window_;
  TORCH_CHECK(optimizer.micro_steps() == 0 && !window.in_hand(),
              "FitMemory: backward must begin a window, which it fills; call optimizer.step() before the next");
  TORCH_CHECK(
      !window.steps_in_backward(),
      "FitMemory: must not be combined with the accumulator's in_backward: its steps during a backward pass cannot be "
      "undone when that pass runs out of memory; use only one of the two");
  TORCH_CHECK(window.steps() == 1, "FitMemory: the accumulator's steps must be 1, since a window is one batch, got ",
              window.steps());
  const auto kind = batch.kind();
  const auto rows = batch.rows();
  TORCH_CHECK(rows > 0, "FitMemory: the batch must have rows");
  optimizer.refresh_parameters();
  fitter_->find_parts(module, checkpointed);
  const auto parameters = window.optimizer().parameters();
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
  const auto forward = detail::with_memory(device, [&] { return detail::ForwardUndo(module.buffers()); });
  detail::WeightedMean mean;
  const auto run_rows = [&](std::int64_t from, std::int64_t to) {
    bool of_kind = true;
    window.set_steps_of_this(std::numeric_limits<std::int64_t>::max());
    batch.part(from, to, [&](const detail::AnyBatch& part) {
      of_kind = part.kind() == kind;
      auto loss = part.loss();
      loss.check();
      mean.add(loss.mean.detach(), loss.items);
      window.backward(std::move(loss), {});
      if (to < rows) window.complete_micro_batch();
    });
    return of_kind;
  };
  const auto undo = [&] {
    forward.put_back();
    mean = {};
    window.discard();
  };
  try {
    fitter_->run({budget, min_rows}, {kind, rows, device, 0, run_rows, undo, [&] { return window.scaled(); }});
  } catch (...) {
    undo();
    throw;
  }
  window.set_steps_of_this(window.micro_steps() + 1);
  return {detail::with_memory(device, [&] { return mean.value(); }), mean.weight()};
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
