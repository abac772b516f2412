// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace gradaccum {

class AmpScaler;
namespace detail {
struct Multiplier;
class WindowGradients;
}  // namespace detail

/// Collects the factors that gradients, or the seed of a backward pass, are still to be multiplied by.
///
///     ga::Gradients gradients(model->parameters());
///     torch::mse_loss(model->forward(x), y).mul(65536.0).backward();
///     gradients.factor().divide(65536.0);                  // the loss scale
///     gradients.factor().multiply(torch::tensor(0.5));     // of a device tensor nobody waits for the value
///     gradients.apply();                                   // one pass for all factors
///     sgd.step();
///
/// A factor is written but not read, so no writer depends on another, and any order of writers gives the same bits:
/// multipliers and divisors are kept apart, sorted before they are joined, and divided once.
///
/// @note Does not wait for the device. A CPU tensor is read at once; a device tensor is copied on the device.
class Factor {
 public:
  void multiply(double by) { multipliers_.push_back(by); }
  void multiply(const at::Tensor& by);
  void divide(double by);
  void divide(const at::Tensor& by);

  /// Makes the step depend on every gradient being finite, for a loss scaler.
  void require_finite() { finiteness_ = std::max(finiteness_, Finiteness::required); }
  /// Like `require_finite()`, but lets an optimizer that can skip the step on the device do so: the host does not wait.
  void require_finite_on_device() { finiteness_ = std::max(finiteness_, Finiteness::required_on_device); }

  /// Returns the whole product, for code that applies it; a writer has no use for it.
  friend detail::Multiplier product_of(const Factor& factor);
  friend bool finite_required(const Factor& factor) { return factor.finiteness_ != Finiteness::any; }
  friend bool may_stay_on_device(const Factor& factor) { return factor.finiteness_ == Finiteness::required_on_device; }
  /// Returns a factor with the requirement alone, once the rest has been applied.
  friend Factor requirement_of(const Factor& factor);

 private:
  enum class Finiteness { any, required_on_device, required };

  friend class AmpScaler;
  friend class detail::WindowGradients;

  static bool on_host(const at::Tensor& by);
  /// Keeps a 0-dim float64 device tensor without a copy: nothing may change it.
  void multiply_by_own(at::Tensor by) { device_multipliers_.push_back(std::move(by)); }
  void divide_by_own(at::Tensor by) { device_divisors_.push_back(std::move(by)); }

  std::vector<double> multipliers_, divisors_;
  std::vector<at::Tensor> device_multipliers_, device_divisors_;
  Finiteness finiteness_ = Finiteness::any;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/factor.ipp>
#endif
