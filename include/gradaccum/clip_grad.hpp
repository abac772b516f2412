// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradaccum {

/// Clips a window's gradients to an L2 norm of at most `max_norm`, by a deferred factor. Returns the norm before.
///
///     if (optimizer.ready()) {
///       auto norm = ga::clip_grad_norm_(optimizer.gradients(), 1.0);      // 0-dim float64; nobody has waited for it
///       if (optimizer.updates() % 100 == 0) std::cout << norm.item<double>() << '\n';
///     }
///     optimizer.step();
///
/// The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. `max_norm` is > 0; infinity
/// only measures. A norm of NaN makes the gradients NaN, as in PyTorch.
///
/// @note Does not wait for the device.
at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

/// torch.nn.utils.clip_grad_norm_ without the wait: clips the gradients of `parameters` in place. Returns their
/// `norm_type`-norm (> 0, or infinity) before, 0-dim float64.
///
///     torch::mse_loss(model->forward(x), y).backward();
///     at::Tensor norm = ga::clip_grad_norm_(model->parameters(), 1.0);
///     sgd.step();
///
/// Unlike LibTorch's own, takes parameters on several devices, sparse gradients, and shared parameters, which count
/// once. In a loop with a GradAccumulator, call the accumulator's `clip_grad_norm_`: this one would clip an unfinished
/// sum, which is an error.
///
/// @note Waits for the device only with `error_if_nonfinite`, which throws before anything is clipped.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

/// Clamps every element of a window's gradients, in their true size, to [-clip_value, clip_value], at once.
///
/// @note Does not wait for the device.
void clip_grad_value_(Gradients gradients, double clip_value);

/// torch.nn.utils.clip_grad_value_, also for sparse gradients and shared parameters.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/clip_grad.ipp>
#endif
