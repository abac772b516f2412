// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/fit_memory.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/forward_undo.hpp>
#include <gradaccum/detail/fitting/out_of_memory.hpp>
#include <gradaccum/detail/trainer/fitted_batches.hpp>
#include <gradaccum/detail/trainer/weighted_mean.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <limits>
#include <memory>
#include <utility>

namespace gradaccum {

GRADACCUM_INLINE void FitMemory::attach(TrainerBase& trainer) {
  auto batches = std::make_unique<detail::FittedBatches>(trainer.loop(), *this);
  trainer.when_built([&batches = *batches] { batches.begin(); });
  trainer.loop().divider = std::move(batches);
}

GRADACCUM_INLINE void FitMemory::state(Archive& archive) {
  archive.setting("budget", budget);
  archive.setting("min_rows", min_rows);
  fitter.state(archive);
}

/// The last backward leaves the window one micro-batch short of being full, as its owner expects before `step()`.
GRADACCUM_INLINE Loss FitMemory::backward(Accumulator& optimizer, torch::nn::Module& module,
                                          const detail::AnyBatch& batch) {
  auto& window = *optimizer.window_;
  TORCH_CHECK(optimizer.micro_steps() == 0 && !window.in_hand(),
              "FitMemory: backward must begin a window, which is full with it; call optimizer.step() before the next");
  TORCH_CHECK(!window.steps_in_backward(),
              "FitMemory: must not go with in_backward: what is stepped inside of a backward pass cannot be taken back "
              "when that runs out of memory");
  TORCH_CHECK(window.steps() == 1, "FitMemory: a window is one batch, so that the accumulator's steps must be 1, got ",
              window.steps());
  const auto kind = batch.kind();
  const auto rows = batch.rows();
  TORCH_CHECK(rows > 0, "FitMemory: the batch must have rows");
  optimizer.follow();
  fitter.find_parts(module, checkpointed);
  const auto parameters = window.optimizer().parameters();
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
  const auto forward = detail::with_memory(device, [&] { return detail::ForwardUndo(module.buffers()); });
  detail::WeightedMean mean;
  const auto run = [&](std::int64_t from, std::int64_t to) {
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
    fitter.run({budget, min_rows}, {kind, rows, device, 0, run, undo, [&] { return window.scaled(); }});
  } catch (...) {
    undo();
    throw;
  }
  window.set_steps_of_this(window.micro_steps() + 1);
  return {detail::with_memory(device, [&] { return mean.value(); }), mean.weight()};
}

}  // namespace gradaccum
