// SPDX-License-Identifier: Apache-2.0
// Implements a window's gradients: their norm, clipping, overflow, and the factor that is applied to them.
#pragma once

#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void clip_by(Factor& factor, const at::Tensor& norm, double max_norm) {
  if (!is_finite(max_norm)) return;  // inf / inf would be NaN
  if (!norm.device().is_cpu()) return factor.multiply(norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0));
  const double coefficient = 1 / (norm.item<double>() + 1e-6) * max_norm;
  factor.multiply(coefficient > 1 ? 1.0 : coefficient);  // NaN stays NaN
}

GRADACCUM_INLINE void WindowGradients::check_open() const {
  TORCH_CHECK(
      !stepped_,
      "Gradients: with in_backward, the gradients of this window were freed after its parameters were stepped; turn "
      "in_backward off for what needs all of them at once (clipping, a loss scaler, norm(), reject(), values(), "
      "apply())");
  TORCH_CHECK(!closed(),
              "Gradients: this window is closed (stepped, skipped, rejected or discarded); call gradients() again");
}

GRADACCUM_INLINE void WindowGradients::check_here() const {
  check_open();
  TORCH_CHECK(!elsewhere(),
              "Gradients: with Shard::gradients, no rank has the gradients of an open window; use them when it is "
              "complete, inside `if (optimizer.ready())`");
}

GRADACCUM_INLINE std::shared_ptr<WindowGradients> WindowGradients::part(const std::vector<std::size_t>& places) {
  auto part = std::make_shared<WindowGradients>(std::vector<at::Tensor>());
  part->sums_ = sums_.part(places);
  part->factor_ = factor_;
  part->set_weights(first_weight_, total_weight_);
  if (look_at_part_ && !places.empty()) look_at_part_(*part);
  return part;
}

GRADACCUM_INLINE void WindowGradients::divide(const std::vector<at::Tensor>& own_pieces,
                                              const std::vector<at::Tensor>& sums) {
  for (auto place : sums_.places()) sums_.forget(place);  // frozen parameters: not sent
  WindowSums own;
  own.set_parameters(own_pieces);
  for (std::size_t place = 0; place < sums.size(); ++place)
    if (sums[place].defined()) own.set(place, sums[place]);
  sums_ = std::move(own);
  place_ = Place::divided;
  norms_.reset();  // measured before the division
}

GRADACCUM_INLINE WindowGradients::Measure WindowGradients::measure() {
  const at::NoGradGuard no_grad;
  const auto gradients = measured();
  found_inf_ = detail::found_inf(gradients, norms_);
  return {l2_norm_of(norms_).item<double>(), found_inf_.item<float>() == 0};
}

GRADACCUM_INLINE void WindowGradients::wait_for_measure() {
  if (!measure_of_all_) return;
  const auto measure = measure_of_all_();
  measure_of_all_ = nullptr;
  norms_ = at::full({1}, measure.norm, norms_.options());
  found_inf_ = at::full({}, measure.finite ? 0.0 : 1.0, found_inf_.options());
}

GRADACCUM_INLINE Multiplier WindowGradients::multiplier() const {
  auto factor = factor_;
  if (!applied() && total_weight_ > 0) {
    factor.multiply(first_weight_);  // the seeds were divided by it
    factor.divide(total_weight_);
  }
  return product_of(factor);
}

GRADACCUM_INLINE std::vector<at::Tensor> WindowGradients::measured() {
  auto gradients = raw();
  wait_for_measure();
  if (norms_.defined() && is_measured(gradients)) return gradients;
  TORCH_CHECK(!measured_of_all(),
              "Gradients: this rank has only a shard of the gradients, and it has changed since the norm of all shards "
              "was measured; get the norm, and whether they are finite, before you change them");
  norms_.reset();
  norms_ = norms(gradients, 2, &norm_memory_);
  found_inf_.reset();
  overflowed_.reset();
  judged_on_device_.reset();
  measured_ = std::vector<SeenTensor>(gradients.begin(), gradients.end());
  return gradients;
}

GRADACCUM_INLINE void WindowGradients::scale(const at::Tensor& norm, const Multiplier& by) const {
  if (by.on_host())
    norm.mul_(std::abs(by.host()));
  else
    norm.mul_(by.on(norm.device()).abs());
}

GRADACCUM_INLINE at::Tensor WindowGradients::window_norm(const std::vector<at::Tensor>& gradients, double max_norm) {
  const auto by = multiplier().moved_to(norms_.device());
  const auto result = window_norm_on_device(norms_, by.pointers(), max_norm);
  if (!found_inf_.defined() && !squares_may_overflow(gradients)) found_inf_ = found_inf_in(result);
  return result;
}

GRADACCUM_INLINE at::Tensor WindowGradients::norm() {
  if (closed() && !stepped_ && norm_.defined()) return norm_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (measured_by_kernel()) return norm_ = norm_in(window_norm(gradients, std::numeric_limits<double>::infinity()));
  norm_ = l2_norm_of(norms_);
  scale(norm_, multiplier());
  return norm_;
}

GRADACCUM_INLINE at::Tensor WindowGradients::clip(double max_norm) {
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (measured_by_kernel() && detail::is_finite(max_norm)) {
    const auto result = window_norm(gradients, max_norm);
    norm_ = norm_in(result);
    factor_.multiply_by_own(clip_coefficient_in(result));
  } else {
    clip_by(factor_, norm(), max_norm);
  }
  return norm_before_clipping_ = norm_;
}

GRADACCUM_INLINE at::Tensor WindowGradients::found_inf() {
  if (verdict_.defined()) return verdict_;
  wait_for_measure();
  if (closed() && found_inf_.defined()) return found_inf_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (found_inf_.defined()) return found_inf_;
  if (measured_by_kernel() && !squares_may_overflow(gradients))
    window_norm(gradients, std::numeric_limits<double>::infinity());
  if (!found_inf_.defined()) found_inf_ = detail::found_inf(gradients, norms_);
  return found_inf_;
}

GRADACCUM_INLINE bool WindowGradients::overflowed(at::Tensor* beside) {
  if (judged_on_device()) overflowed_ = judged_on_device_.item<float>() != 0;
  if (closed() || !must_be_finite()) return overflowed_.value_or(false);
  auto found = found_inf();  // forgets the last answer if a gradient has changed
  if (overflowed_) return *overflowed_;
  if (beside && beside->defined() && !found.is_cpu() && beside->device() == found.device()) {
    const auto both = at::stack({found.to(at::kDouble), *beside}).cpu();
    found = both[0], *beside = both[1];
  }
  overflowed_ = found.item<double>() != 0;
  return *overflowed_;
}

GRADACCUM_INLINE void WindowGradients::reject(std::string why) {
  check_open();
  TORCH_CHECK(complete(),
              "Gradients: reject() is for a complete window; call it after backward, inside `if "
              "(optimizer.ready())`, or drop the window's micro-batches so far by optimizer.discard()");
  if (!rejected_) rejected_ = std::move(why);
}

GRADACCUM_INLINE void WindowGradients::apply() {
  check_open();
  TORCH_CHECK(complete(),
              "Gradients: apply() and values() inside a window would mix multiplied sums with those to come; "
              "call them after backward, inside `if (optimizer.ready())`");
  at::NoGradGuard no_grad;
  if (must_be_finite()) verdict_ = found_inf();
  const auto by = multiplier();
  const bool known = measured_of_all() && is_measured(raw());
  if (!by.is_one()) multiply_(raw(), by);
  factor_ = requirement_of(factor_);
  state_ = State::applied;
  sums_.become_gradients();
  if (!known) return;
  wait_for_measure();
  scale(norms_, by);
  const auto gradients = raw();
  measured_ = std::vector<SeenTensor>(gradients.begin(), gradients.end());
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
