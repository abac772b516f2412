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

/// The gradients of one window, and the factor that they are yet to be multiplied by.
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
/// Loss scaling, the mean over a window, the mean over ranks and clipping all multiply the same gradients. Done one by
/// one, each is a pass over memory, in an order that is easily wrong. Here each is a `factor()`, and all are applied at
/// once: by an optimizer that takes `Gradients`, inside its own pass; for any other by `apply()`, before its step.
///
/// A handle: copies are the same window, and all of them are `closed()` with it. Made from a list of parameters, it is
/// a window of one batch. Parameters may be of any dtype, on several devices, shared or frozen; gradients dense or
/// sparse (COO), and undefined where there is none.
///
/// @note Nothing here but `overflowed()` waits for the device, apart from reading a tensor that it returns.
/// (Where parameters lie on the CPU and on a device, a factor known on the device alone is waited for.) Where they are
/// divided among processes, norms and what is not finite are heard from the others.
class Gradients {
 public:
  explicit Gradients(const std::vector<at::Tensor>& parameters);
  /// For those who own a window: an accumulator, a scaler.
  explicit Gradients(std::shared_ptr<detail::WindowGradients> window);

  /// What all gradients are yet to be multiplied by. Deferred, and write-only.
  Factor& factor();

  /// The sum of the weights of the window's micro-batches so far, on this rank; 1 a micro-batch where none was given.
  double items() const;

  /// The parameters that have a gradient, in the order of `raw()` and `values()`.
  std::vector<at::Tensor> parameters() const;

  /// The gradients as they lie in memory, not multiplied yet: `.grad`, or the sums that are kept apart from it.
  /// For optimizers, which multiply by `multiplier(device)` themselves.
  std::vector<at::Tensor> raw() const;

  /// The gradients in their true size, `.grad` of each, to be read and changed. Applies the factor first; in a window
  /// that is not complete yet that throws.
  std::vector<at::Tensor> values();

  /// What `raw()` is yet to be multiplied by: the factor and the mean over the window. A 0-dim float64 tensor.
  at::Tensor multiplier(at::Device device) const;

  /// L2 norm of the gradients in their true size, 0-dim float64; duplicates in a sparse gradient count as their sum.
  /// Kept until a gradient changes.
  at::Tensor norm();

  /// What `norm()` was before `clip_grad_norm_` clipped these gradients; undefined if nobody did.
  const at::Tensor& norm_before_clipping() const;
  /// For those who clip.
  void set_norm_before_clipping(at::Tensor norm);

  /// 1 if an element is inf or NaN, else 0: 0-dim float32. Finite numbers whose squares overflow are finite.
  at::Tensor found_inf();

  /// A scaler is at work: the step is to be taken only if all is finite.
  bool finite_required() const;
  /// So it is, and whoever can leave out the step on the device may do so by `judge_on_device()`.
  bool may_be_judged_on_device() const;

  /// The step must be left out: all was required to be finite, and is not. Waits for the device, for 4 bytes, the first
  /// time in a window.
  bool overflowed();
  /// `found_inf()`, in place of `overflowed()`: the host need not know.
  at::Tensor judge_on_device();
  /// Either has been asked: somebody was about to step.
  bool judged() const;
  bool judged_on_device() const;  ///< and nobody has asked on the host since

  /// Multiplies the gradients by the factor, and sums that are kept apart become `.grad`. A second call does nothing.
  void apply();

  /// The window is over: stepped, skipped or discarded. Then `items()` still answers, and `norm()` and `found_inf()` if
  /// they did before; the gradients are no longer its own.
  bool closed() const;

  /// `multiplier` in its parts: what of it is known on the host needs no device.
  friend detail::Multiplier product_of(const Gradients& gradients);
  friend at::Tensor clip_grad_norm_(Gradients gradients, double max_norm);

 private:
  std::shared_ptr<detail::WindowGradients> window_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/gradients.ipp>
#endif
