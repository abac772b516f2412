// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/snapshot.hpp>
#include <gradaccum/detail/tensor_lists.hpp>
#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <unordered_set>
#include <vector>

namespace gradaccum::detail {

/// What `Gradients` is a handle of: one window's gradients, their deferred factor, and what has been measured of them.
class WindowGradients {
 public:
  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { set_parameters(parameters); }

  // For the accumulator that owns the window.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& all_parameters() const { return parameters_; }
  std::vector<at::Tensor>& sums() { return sums_; }  ///< kept apart; where undefined, `.grad` is the sum
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_complete(bool complete) { complete_ = complete; }
  bool applied() const { return applied_; }
  void close() {
    closed_ = true;
    for (auto* tensors : {&parameters_, &sums_, &with_gradient_, &raw_}) tensors->clear();
  }

  // For `Gradients`, whose documentation these share.
  bool closed() const { return closed_; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  const std::vector<at::Tensor>& parameters() { return find_gradients(), with_gradient_; }
  const std::vector<at::Tensor>& raw() { return find_gradients(), raw_; }
  Multiplier multiplier() const;
  at::Tensor norm();
  at::Tensor found_inf();
  void apply();

 private:
  void check_open() const {
    TORCH_CHECK(!closed_, "Gradients: this window is closed (stepped, skipped or discarded); ask for gradients() anew");
  }
  void find_gradients();
  void measure();
  void show_sums();

  std::vector<at::Tensor> parameters_, sums_, with_gradient_, raw_;
  Factor factor_;
  double first_weight_ = 1.0, total_weight_ = 1.0;
  bool complete_ = true, applied_ = false, closed_ = false;
  at::Tensor norms_, norm_, found_inf_, verdict_;
  Snapshot measured_;              // what norms_ is of
  std::optional<Snapshot> shown_;  // the .grad that were made from sums_
};

/// A shared parameter is multiplied once, however often it is listed.
inline void WindowGradients::set_parameters(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> known;
  std::vector<at::Tensor> distinct, sums;
  for (auto& parameter : parameters) {
    TORCH_CHECK(parameter.defined(), "Gradients: a parameter is an undefined tensor");
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(parameter);
    auto& sum = sums.emplace_back();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].is_same(parameter)) sum = sums_[i];
  }
  parameters_ = std::move(distinct);
  sums_ = std::move(sums);
}

/// What `raw()` is yet to be multiplied by: the factor, and the mean over the window.
inline Multiplier WindowGradients::multiplier() const {
  auto factor = factor_;
  if (!applied_ && total_weight_ > 0) {
    factor.multiply(first_weight_);  // the seeds were divided by it
    factor.divide(total_weight_);
  }
  return product_of(factor);
}

/// Looked for at every question: backward may have gone on since the last.
inline void WindowGradients::find_gradients() {
  check_open();
  with_gradient_.clear();
  raw_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& shown = parameters_[i].grad();
    if (shown_ && sums_[i].defined() && !shown_->untouched(i, shown))
      sums_[i].reset();  // changed by the user: it counts
    const auto& gradient = sums_[i].defined() ? sums_[i] : shown;
    if (!gradient.defined()) continue;
    with_gradient_.push_back(parameters_[i]);
    raw_.push_back(gradient);
  }
}

/// One norm a gradient, as they lie in memory; measured anew only where a gradient changed.
inline void WindowGradients::measure() {
  find_gradients();
  if (norms_.defined() && measured_.untouched(raw_)) return;
  at::NoGradGuard no_grad;
  norms_ = norms(raw_, 2);
  found_inf_.reset();
  measured_ = Snapshot(raw_);
}

inline at::Tensor WindowGradients::norm() {
  if (closed_ && norm_.defined()) return norm_;
  measure();
  at::NoGradGuard no_grad;
  const auto by = multiplier();
  norm_ = norms_.norm();
  if (!by.is_one()) norm_ = norm_.mul(by.on(norm_.device()).abs());
  return norm_;
}

inline at::Tensor WindowGradients::found_inf() {
  if (verdict_.defined() || (closed_ && found_inf_.defined())) return verdict_.defined() ? verdict_ : found_inf_;
  measure();
  at::NoGradGuard no_grad;
  if (!found_inf_.defined()) found_inf_ = detail::found_inf(raw_, norms_);
  return found_inf_;
}

inline void WindowGradients::apply() {
  find_gradients();
  TORCH_CHECK(complete_,
              "Gradients: apply() and values() inside a window would mix multiplied sums with those to come; "
              "call them after backward, inside `if (optimizer.ready())`");
  at::NoGradGuard no_grad;
  if (must_be_finite() && !verdict_.defined()) verdict_ = found_inf();  // it stands, even if the user mends .grad
  const auto by = multiplier();
  if (!by.is_one()) {
    const bool known = norms_.defined() && measured_.untouched(raw_);
    multiply_(raw_, by);
    if (known) norms_ = norms_.mul(by.on(norms_.device()).abs());
    if (known) measured_ = Snapshot(raw_);
  }
  const bool finite = must_be_finite();
  factor_ = Factor();
  if (finite) factor_.require_finite();
  applied_ = true;
  if (!by.is_one() || !shown_) show_sums();
}

/// Sums that were kept apart become `.grad` once they have their true size: any code may read and change them.
inline void WindowGradients::show_sums() {
  std::vector<at::Tensor> shown(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (sums_[i].defined()) shown[i] = parameters_[i].mutable_grad() = sums_[i].to(parameters_[i].scalar_type());
  shown_ = Snapshot(shown);
}

}  // namespace gradaccum::detail
