// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/count.hpp>

#include <ATen/core/ScalarType.h>

#include <optional>

namespace gradaccum {

/// How an accumulator gathers gradients, and when it steps.
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
/// With `in_backward` the backward that fills the window steps each parameter when its gradient is there, and frees the
/// gradient. Windows of one then hold no gradients but the one in hand: 12 bytes a parameter for AdamW in place of 16.
/// The parameters are those of the ordinary step, to the bit. What that backward does not reach, and a flushed window,
/// are stepped when the window closes.
///
/// It takes an optimizer that takes gradients (`ga::optim`), and `optimizer.backward(loss)`. Errors before anything
/// moves: clipping, a loss scaler, `create_graph`. Errors afterwards: asking for the gradients of a full window, and a
/// gradient that arrives twice in one pass. After an exception in that backward some parameters have moved, and only a
/// saved state leads back; `discard()` does not take back what has moved either.
///
/// The learning rate is the one at that backward. Hooks of others that wait for a gradient run before its step. What a
/// checkpointed block reads of a parameter without a gradient (`detach()`, a comparison) may have moved when it runs
/// again.
///
/// @note Parameters are stepped some 65'000 elements at a time: small ones wait for each other. The program
/// does not wait for the device.
struct GradAccumulatorOptions {
  detail::Count steps = 1;                           ///< micro-batches an update, >= 1
  std::optional<at::ScalarType> accumulate_in = {};  ///< kFloat: 16-bit gradients are summed in float32, 4 bytes each
  bool in_backward = false;  ///< the backward that fills the window steps each parameter, and frees its gradient
};

}  // namespace gradaccum
