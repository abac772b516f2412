// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/snapshot.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>
#include <gradaccum/detail/window/window_sums.hpp>
#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What `Gradients` is a handle of: one window's gradients, their deferred factor, and what has been measured of them.
///
/// It holds parameters, and gradients only where they are sums of its own: those that the user clears are free at once.
class WindowGradients {
 public:
  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { sums_.set_parameters(parameters); }

  // For the accumulator that owns the window, and what exchanges its sums with other processes.
  WindowSums& sums() { return sums_; }
  const std::vector<at::Tensor>& all_parameters() const { return sums_.parameters(); }
  void fold_into_sum(std::size_t place, at::ScalarType dtype) {
    if (!applied_) sums_.fold(place, dtype);
  }
  void fold_into_sums(at::ScalarType dtype) {
    for (std::size_t place = 0; place < sums_.size(); ++place) fold_into_sum(place, dtype);
  }
  double first_weight() const { return first_weight_; }
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_complete(bool complete) { complete_ = complete; }
  bool applied() const { return applied_; }

  // For stepping in backward.
  /// Some of the parameters as a window of their own, complete, with the same factor and mean.
  std::shared_ptr<WindowGradients> part(const std::vector<std::size_t>& places) {
    auto part = std::make_shared<WindowGradients>(std::vector<at::Tensor>());
    part->sums_ = sums_.part(places);
    part->factor_ = factor_;
    part->set_weights(first_weight_, total_weight_);
    return part;
  }
  /// What has not been stepped: for those without a gradient in that backward, of earlier micro-batches.
  std::shared_ptr<WindowGradients> rest() { return part(sums_.places()); }
  bool stepped() const { return stepped_; }
  void set_stepped() { stepped_ = true; }
  void free() {
    for (auto& parameter : all_parameters()) parameter.mutable_grad().reset();
    close();
  }

  void close() {
    closed_ = true;
    sums_ = {};
  }

  // For `Gradients`, whose documentation these share.
  bool closed() const { return closed_; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  std::vector<at::Tensor> parameters() const {
    check_open();
    std::vector<at::Tensor> with_gradient;
    for (auto place : sums_.places()) with_gradient.push_back(all_parameters()[place]);
    return with_gradient;
  }
  std::vector<at::Tensor> raw() const {
    check_open();
    std::vector<at::Tensor> gradients;
    for (auto place : sums_.places()) gradients.push_back(sums_[place]);
    return gradients;
  }
  Multiplier multiplier() const;
  at::Tensor norm();
  const at::Tensor& norm_before_clipping() const { return norm_before_clipping_; }
  void set_norm_before_clipping(at::Tensor norm) { norm_before_clipping_ = std::move(norm); }
  at::Tensor found_inf();
  bool overflowed();
  bool judged() const { return overflowed_.has_value(); }
  void apply();

 private:
  void check_open() const {
    TORCH_CHECK(!stepped_,
                "Gradients: with in_backward the gradients of this window are gone, its parameters were stepped with "
                "them as they arrived; what needs all of them at once (clipping, a loss scaler, norm(), values(), "
                "apply()) goes without in_backward");
    TORCH_CHECK(!closed_, "Gradients: this window is closed (stepped, skipped or discarded); ask for gradients() anew");
  }
  std::vector<at::Tensor> measured();

  WindowSums sums_;
  Factor factor_;
  double first_weight_ = 1.0, total_weight_ = 1.0;
  bool complete_ = true, applied_ = false, closed_ = false;
  bool stepped_ = false;          // some of the parameters, and their gradients are gone
  Snapshot measured_;             // of the gradients of which these are:
  at::Tensor norms_, found_inf_;  // as they lie in memory
  at::Tensor norm_, verdict_;     // the last answer; what a scaler must hear, even if the user mends .grad
  at::Tensor norm_before_clipping_;
  std::optional<bool> overflowed_;
};

/// What `raw()` is yet to be multiplied by: the factor, and the mean over the window.
inline Multiplier WindowGradients::multiplier() const {
  auto factor = factor_;
  if (!applied_ && total_weight_ > 0) {
    factor.multiply(first_weight_);  // the seeds were divided by it
    factor.divide(total_weight_);
  }
  return product_of(factor);
}

/// The gradients, with their norms measured; anew only where one has changed.
inline std::vector<at::Tensor> WindowGradients::measured() {
  auto gradients = raw();
  if (norms_.defined() && measured_.untouched(gradients)) return gradients;
  norms_ = norms(gradients, 2);
  found_inf_.reset();
  overflowed_.reset();
  measured_ = Snapshot(gradients);
  return gradients;
}

inline at::Tensor WindowGradients::norm() {
  if (closed_ && !stepped_ && norm_.defined()) return norm_;
  at::NoGradGuard no_grad;
  measured();
  const auto by = multiplier();
  norm_ = l2_norm_of(norms_);
  if (by.on_host())
    norm_.mul_(std::abs(by.host()));
  else
    norm_.mul_(by.on(norm_.device()).abs());
  return norm_;
}

inline at::Tensor WindowGradients::found_inf() {
  if (verdict_.defined()) return verdict_;
  if (closed_ && found_inf_.defined()) return found_inf_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (!found_inf_.defined()) found_inf_ = detail::found_inf(gradients, norms_);
  return found_inf_;
}

/// The one place where the host waits for the device. A closed window answers what it said when it was stepped.
inline bool WindowGradients::overflowed() {
  if (closed_ || !must_be_finite()) return overflowed_.value_or(false);
  const auto found = found_inf();  // forgets the last answer if a gradient has changed
  if (!overflowed_) overflowed_ = found.item<float>() != 0;
  return *overflowed_;
}

/// Sums that were kept apart become `.grad` once they have their true size: any code may read and change them there.
inline void WindowGradients::apply() {
  check_open();
  TORCH_CHECK(complete_,
              "Gradients: apply() and values() inside a window would mix multiplied sums with those to come; "
              "call them after backward, inside `if (optimizer.ready())`");
  at::NoGradGuard no_grad;
  if (must_be_finite()) verdict_ = found_inf();
  if (const auto by = multiplier(); !by.is_one()) multiply_(raw(), by);
  const bool finite = must_be_finite();
  factor_ = Factor();
  if (finite) factor_.require_finite();
  applied_ = true;
  sums_.become_gradients();
}

}  // namespace gradaccum::detail
