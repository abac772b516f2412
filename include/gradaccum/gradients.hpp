// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace gradaccum {

namespace detail {
class WindowGradients;
}

/// The gradients of one window, and the factor that they are still to be multiplied by.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 4});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.ready())
///         for (auto& gradient : optimizer.gradients().values()) gradient.add_(torch::randn_like(gradient), 1e-3);
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// Loss scaling, the mean over a window, the mean over ranks and clipping all multiply the same gradients. One by one,
/// each takes a pass over memory, in an order that is easily wrong. Here each is a `factor()`, and all are applied at
/// once: by an optimizer that takes `Gradients` inside its own pass, for any other by `apply()` before its step.
///
/// A handle: copies refer to the same window, and are `closed()` with it. Made from a list of parameters, it is a
/// window of one batch. Parameters may be of any dtype, on several devices, shared or frozen; gradients may be dense,
/// sparse (COO) or undefined.
///
/// @note Only `overflowed()` waits for the device, apart from reading a returned tensor. (With parameters on the CPU
/// and on a device, a factor that is known only on the device is waited for.) With sharded parameters, norms and
/// overflows are exchanged with the other ranks.
class Gradients {
 public:
  explicit Gradients(const std::vector<at::Tensor>& parameters);
  /// For owners of a window: an accumulator, a scaler.
  explicit Gradients(std::shared_ptr<detail::WindowGradients> window);

  /// The factor that all gradients are still to be multiplied by. Deferred, and write-only.
  Factor& factor();

  /// The sum of the weights of the window's micro-batches so far, on this rank; 1 for a micro-batch without a weight.
  double items() const;

  /// The parameters that have a gradient, in the order of `raw()` and `values()`.
  std::vector<at::Tensor> parameters() const;

  /// The gradients as they lie in memory, not multiplied yet: `.grad`, or the sums that are kept apart from it.
  /// For optimizers, which multiply by `multiplier(device)` themselves.
  std::vector<at::Tensor> raw() const;

  /// The `.grad` of each parameter in its true size, to be read and changed. Applies the factor first, and throws
  /// inside a window that is not complete.
  std::vector<at::Tensor> values();

  /// The number that `raw()` is still to be multiplied by, 0-dim float64: the factor and the mean over the window.
  at::Tensor multiplier(at::Device device) const;

  /// L2 norm of the gradients in their true size, 0-dim float64; duplicates in a sparse gradient count as their sum.
  /// Kept until a gradient changes.
  at::Tensor norm();

  /// The `norm()` before `clip_grad_norm_` clipped these gradients; undefined if they were not clipped.
  const at::Tensor& norm_before_clipping() const;
  /// For functions that clip.
  void set_norm_before_clipping(at::Tensor norm);

  /// Returns 1 if an element is inf or NaN, else 0: 0-dim float32. Finite numbers whose squares overflow are finite.
  at::Tensor found_inf();

  /// True if the step is to be taken only with finite gradients, as a loss scaler requires.
  bool finite_required() const;
  /// True if finite gradients are required and the optimizer may skip the step on the device, by `judge_on_device()`.
  bool may_be_judged_on_device() const;

  /// True if the step must be skipped: gradients are required to be finite, and are not. Reads 4 bytes from the device,
  /// and waits for them, on the first call in a window.
  bool overflowed();
  /// Returns `found_inf()`, for a step that the device skips by itself, in place of `overflowed()`.
  at::Tensor judge_on_device();
  /// True if `overflowed()` or `judge_on_device()` was called, so a step was about to be taken.
  bool judged() const;
  bool judged_on_device() const;  ///< by `judge_on_device()`, and the host has not read the result since

  /// Multiplies the gradients by the factor, and moves sums that are kept apart to `.grad`. A second call does nothing.
  void apply();

  /// True once the window was stepped, skipped or discarded. Then `items()` still answers, and so do `norm()` and
  /// `found_inf()` if they did before; the gradients no longer belong to the window.
  bool closed() const;

  /// Returns `multiplier` in its parts: the part that is known on the host needs no device.
  friend detail::Multiplier product_of(const Gradients& gradients);
  friend at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

 private:
  std::shared_ptr<detail::WindowGradients> window_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/gradients.ipp>
#endif
