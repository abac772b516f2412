// SPDX-License-Identifier: Apache-2.0
// Connects the search for rows that fit into memory to a Trainer, or to a hand-written loop.
#pragma once

#include <gradaccum/policies/fit_memory.hpp>

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/detail/trainer/loop.hpp>
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

struct FitMemory::Run {
  detail::MemoryFitter fitter = {};
};

namespace detail {

/// Divides a Trainer's batches into micro-batches that fit into memory; see `FitMemory`.
class FittedBatches final : public BatchDivider {
 public:
  FittedBatches(Loop& loop, const FitMemory& memory) : loop_(loop), memory_(memory) {}

  /// Divides a batch of an evaluation into parts of as many rows as in training, if that number is known.
  void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const override {
    if (!batch.is_divisible()) return use(batch);
    const auto rows = batch.rows();
    const auto at_once = fitter().known_rows(batch.kind()).value_or(rows);
    if (rows <= at_once) return use(batch);
    for (std::int64_t from = 0; from < rows; from += at_once) batch.part(from, std::min(rows, from + at_once), use);
  }

  /// Returns the row where the current window ends: a batch may span several if `Accumulate` counts samples. Neither
  /// this window's part of the batch nor the rest has fewer than `min_rows`.
  std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const override {
    const auto rows = batch.rows();
    const auto left = loop_.batch_size - loop_.record.so_far().samples;
    if (loop_.batch_size == 0 || left <= 0 || batch.samples() != rows) return rows;
    const auto to = from + std::max(left, memory_.min_rows);
    return rows - to < memory_.min_rows ? rows : to;
  }

  /// Trains with rows of a batch. After running out of memory, restores the sums of the open window and the state of
  /// policies that see micro-batches from copies.
  void run(const AnyBatch& batch, std::int64_t from, std::int64_t to) override {
    auto& window = loop_.window;
    const auto device = loop_.trainer.device();
    const auto kind = batch.kind();
    const auto record = loop_.record;
    const auto status = loop_.status;
    const bool is_open = record.so_far().micro_batches > 0;
    const auto gradients = is_open ? window.bytes() : 0;
    const auto forward = with_memory(device, [&] { return ForwardUndo(loop_.trainer.module().buffers()); });
    std::optional<OpenWindow::Copy> sums;
    if (is_open) sums.emplace(with_memory(device, [&] { return window.copy(); }));
    Archive policies;
    loop_.policies.state_in_window(policies);
    bool begins = true;
    const auto run_rows = [&](std::int64_t first, std::int64_t last) {
      bool of_kind = true;
      batch.part(from + first, from + last, [&](const AnyBatch& part) {
        of_kind = part.kind() == kind;
        loop_.micro_batch(part, std::exchange(begins, false), /*may_close=*/from + last == to);
      });
      return of_kind;
    };
    const auto undo = [&] {
      forward.put_back();
      Archive seen(policies.values());
      loop_.policies.state_in_window(seen);
      loop_.record = record, loop_.status = status;
      window.discard();
      if (sums) with_memory(device, [&] { window.go_back(*sums); });
      begins = true;
    };
    if (from == to) return static_cast<void>(run_rows(0, 0));
    fitter().run({memory_.budget, memory_.min_rows},
                 {kind, to - from, device, 2 * gradients, run_rows, undo, [&] { return window.scaled(); }});
  }

 private:
  Loop& loop_;
  const FitMemory& memory_;
  MemoryFitter& fitter() const { return memory_.made_run().fitter; }  // not kept: the policy may be assigned
};

}  // namespace detail

/// Keeps the sizes that an earlier hand-written loop has found.
GRADACCUM_INLINE void FitMemory::attach(TrainerBase& trainer) {
  run.reset(run ? new Run(*run) : new Run);
  auto& loop = trainer.loop();
  trainer.when_built([this, &loop] {
    TORCH_CHECK(!loop.window.steps_in_backward(),
                "FitMemory: must not be combined with OptimizerInBackward: steps during a backward pass cannot be "
                "undone when it runs out of memory; use only one of the two");
    TORCH_CHECK(!loop.window.peers() || !loop.window.peers()->take_each_backward(),
                "FitMemory: must not be combined with Shard::gradients: gradients that were sent to other ranks cannot "
                "be taken back when a backward pass runs out of memory; use Shard::optimizer");
    made_run().fitter.find_parts(loop.trainer.module(), checkpointed);
  });
  loop.divider = std::make_unique<detail::FittedBatches>(loop, *this);
}

GRADACCUM_INLINE void FitMemory::state(Archive& archive) {
  archive.setting("budget", budget);
  archive.setting("min_rows", min_rows);
  made_run().fitter.state(archive);
}

GRADACCUM_INLINE const MemoryPlan& FitMemory::plan() const { return made_run().fitter.plan(); }

GRADACCUM_INLINE FitMemory::Run& FitMemory::made_run() const {
  if (!run) run.reset(new Run);
  return *run;
}

/// Leaves the last micro-batch incomplete, so that `step()` completes it and the window, as after any backward().
GRADACCUM_INLINE Loss FitMemory::backward(Accumulator& optimizer, torch::nn::Module& module,
                                          const detail::AnyBatch& batch) {
  auto& window = *optimizer.window_;
  TORCH_CHECK(optimizer.micro_steps() == 0 && !window.in_hand(),
              "FitMemory: backward must begin a window, which it fills; call optimizer.step() before the next");
  TORCH_CHECK(!window.steps_in_backward(),
              "FitMemory: must not be combined with in_backward: steps during a backward pass cannot be undone when it "
              "runs out of memory");
  TORCH_CHECK(window.steps() == 1, "FitMemory: the accumulator's steps must be 1, since a window is one batch, got ",
              window.steps());
  const auto kind = batch.kind();
  const auto rows = batch.rows();
  TORCH_CHECK(rows > 0, "FitMemory: the batch must have rows");
  optimizer.refresh_parameters();
  made_run().fitter.find_parts(module, checkpointed);
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
    run->fitter.run({budget, min_rows}, {kind, rows, device, 0, run_rows, undo, [&] { return window.scaled(); }});
  } catch (...) {
    undo();
    throw;
  }
  window.set_steps_of_this(window.micro_steps() + 1);
  return {detail::with_memory(device, [&] { return mean.value(); }), mean.weight()};
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
