// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/count.hpp>

#include <ATen/core/ScalarType.h>

#include <optional>

namespace gradaccum {

/// Options of an accumulator: how it gathers gradients, and when it steps.
///
///     ga::optim::AdamW adamw(model->parameters(), 1e-3);
///     ga::GradAccumulator optimizer(adamw, {.steps = 4, .in_backward = true});
///     for (auto& batch : batches) {
///       optimizer.backward(torch::mse_loss(model->forward(batch.data), batch.target));  // the 4th moves them
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     optimizer.flush();
///
/// With `in_backward` the backward that fills the window steps each parameter as soon as its gradient is there, and
/// frees the gradient. Windows of one micro-batch then hold one gradient at a time: 12 bytes a parameter for AdamW in
/// place of 16. The parameters equal those of the ordinary step, to the bit. Parameters that this backward does not
/// reach, and a flushed window, are stepped when the window closes.
///
/// That needs an optimizer that takes gradients (`ga::optim`), and `optimizer.backward(loss)`. Clipping, a loss scaler
/// and `create_graph` are errors before anything moves. Reading the gradients of a full window, and a gradient that
/// arrives twice in one pass, are errors afterwards. After an exception in that backward some parameters have moved:
/// only a saved state restores them, `discard()` does not.
///
/// The learning rate is the one at that backward. Other hooks on a gradient run before its step. If a checkpointed
/// block reads a parameter without a gradient (`detach()`, a comparison), it may have moved when the block is
/// recomputed.
///
/// @note Parameters are stepped some 65'000 elements at a time, so small ones wait for each other. The program does not
/// wait for the device.
struct GradAccumulatorOptions {
  detail::Count steps = 1;                           ///< micro-batches an update, >= 1
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: sums 16-bit gradients in float32, 4 bytes each
  bool in_backward = false;  ///< the backward that fills the window steps each parameter, and frees its gradient
};

}  // namespace gradaccum
