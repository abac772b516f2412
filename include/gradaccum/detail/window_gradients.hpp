// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/snapshot.hpp>
#include <gradaccum/detail/tensor_lists.hpp>
#include <gradaccum/detail/window_state.hpp>
#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What `Gradients` is a handle of: one window's gradients, their deferred factor, and what has been measured of them.
///
/// It holds parameters, and gradients only where they are sums of its own: those that the user clears are free at once.
class WindowGradients {
 public:
  /// Of each parameter, where there is one: in its `.grad`, and kept apart.
  struct Sums {
    std::vector<at::Tensor> in_grad, apart;
  };

  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { set_parameters(parameters); }

  // For the accumulator that owns the window.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& all_parameters() const { return parameters_; }
  void fold_into_sums(at::ScalarType dtype) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) fold_into_sum(i, dtype);
  }
  void fold_into_sum(std::size_t place, at::ScalarType dtype);
  SumsByName named_sums(const NameOf& name_of) const;
  /// What `named_sums` gave, checked; if `lenient`, what does not fit is left out.
  Sums take_sums(SumsByName named, const NameOf& name_of, bool lenient) const;
  void set_sums(const Sums& sums);
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_complete(bool complete) { complete_ = complete; }
  bool applied() const { return applied_; }

  // For what exchanges them with other processes: by place in `all_parameters()`.
  const at::Tensor& gradient(std::size_t place) const {
    return sums_[place].defined() ? sums_[place] : parameters_[place].grad();
  }
  /// Where there was none.
  void set_gradient(std::size_t place, const at::Tensor& gradient) {
    const bool apart = gradient.scalar_type() != parameters_[place].scalar_type();
    (apart ? sums_[place] : parameters_[place].mutable_grad()) = gradient;
  }
  double first_weight() const { return first_weight_; }

  // For stepping in backward.
  std::shared_ptr<WindowGradients> part(const std::vector<std::size_t>& places);
  std::shared_ptr<WindowGradients> rest();
  bool stepped() const { return stepped_; }
  void set_stepped() { stepped_ = true; }
  void free() {
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
    close();
  }

  void close() {
    closed_ = true;
    parameters_.clear();
    sums_.clear();
  }

  // For `Gradients`, whose documentation these share.
  bool closed() const { return closed_; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> raw() const;
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

  std::vector<at::Tensor> parameters_, sums_;  // a sum that is kept apart; where undefined, `.grad` is the sum
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

/// Adds a gradient narrower than `dtype` to a sum of that dtype. `.grad` is free again: the next backward need not add
/// to it.
inline void WindowGradients::fold_into_sum(std::size_t place, at::ScalarType dtype) {
  if (applied_) return;
  at::NoGradGuard no_grad;
  auto& gradient = parameters_[place].mutable_grad();
  auto& sum = sums_[place];
  if (!gradient.defined() || at::elementSize(gradient.scalar_type()) >= at::elementSize(dtype)) return;
  if (!sum.defined())
    sum = gradient.detach().to(dtype);
  else if (sum.is_sparse() && !gradient.is_sparse())  // ATen adds a sparse tensor to a dense one, not the reverse
    sum = gradient.detach().to(dtype).add_(sum);
  else
    sum.add_(gradient);
  gradient.reset();
}

inline SumsByName WindowGradients::named_sums(const NameOf& name_of) const {
  SumsByName named;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    named.add("grad", name_of(parameters_[i]), parameters_[i].grad());
    named.add("sum", name_of(parameters_[i]), sums_[i]);
  }
  return named;
}

inline WindowGradients::Sums WindowGradients::take_sums(SumsByName named, const NameOf& name_of, bool lenient) const {
  Sums all;
  for (auto& parameter : parameters_) {
    at::Tensor gradient, sum;
    try {
      const auto& name = name_of(parameter);
      sum = named.take("sum", name, parameter);
      gradient = named.take("grad", name, parameter);
      TORCH_CHECK(!gradient.defined() || gradient.scalar_type() == parameter.scalar_type(),
                  "GradAccumulator: the state's gradient of ", name, " must be ", parameter.scalar_type(), ", got ",
                  gradient.scalar_type());
    } catch (const c10::Error&) {
      if (!lenient) throw;
      gradient.reset();
    }
    all.in_grad.push_back(gradient);
    all.apart.push_back(sum);
  }
  if (!lenient) named.check_all_taken();
  return all;
}

inline void WindowGradients::set_sums(const Sums& sums) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = sums.in_grad[i];
  sums_ = sums.apart;
}

/// Some of the parameters as a window of their own, complete, with the same factor and mean. Sums that are kept apart
/// move there.
inline std::shared_ptr<WindowGradients> WindowGradients::part(const std::vector<std::size_t>& places) {
  std::vector<at::Tensor> parameters;
  for (auto place : places) parameters.push_back(parameters_[place]);
  auto part = std::make_shared<WindowGradients>(parameters);
  for (std::size_t i = 0; i < places.size(); ++i) part->sums_[i] = std::move(sums_[places[i]]);
  part->factor_ = factor_;
  part->set_weights(first_weight_, total_weight_);
  return part;
}

/// What has not been stepped in backward: for those without a gradient there, of earlier micro-batches.
inline std::shared_ptr<WindowGradients> WindowGradients::rest() {
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (gradient(i).defined()) places.push_back(i);
  return part(places);
}

inline std::vector<at::Tensor> WindowGradients::parameters() const {
  check_open();
  std::vector<at::Tensor> with_gradient;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (gradient(i).defined()) with_gradient.push_back(parameters_[i]);
  return with_gradient;
}

inline std::vector<at::Tensor> WindowGradients::raw() const {
  check_open();
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (gradient(i).defined()) gradients.push_back(gradient(i));
  return gradients;
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
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!sums_[i].defined()) continue;
    parameters_[i].mutable_grad() = sums_[i].to(parameters_[i].scalar_type());
    sums_[i].reset();
  }
}

}  // namespace gradaccum::detail
