// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/window_gradients.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/multiplier.hpp>
#include <gradaccum/detail/window/shards.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace gradaccum::detail {

GRADACCUM_INLINE void WindowGradients::check_open() const {
  TORCH_CHECK(
      !stepped_,
      "Gradients: with in_backward the gradients of this window are gone, its parameters were stepped with them "
      "as they arrived; what needs all of them at once (clipping, a loss scaler, norm(), values(), apply()) "
      "goes without in_backward");
  TORCH_CHECK(!closed_, "Gradients: this window is closed (stepped, skipped or discarded); ask for gradients() anew");
}

GRADACCUM_INLINE void WindowGradients::fold_into_sum(std::size_t place, std::optional<at::ScalarType> dtype) {
  if (!applied_) sums_.fold(place, dtype);
}

GRADACCUM_INLINE void WindowGradients::fold_into_sums(std::optional<at::ScalarType> dtype) {
  for (std::size_t place = 0; place < sums_.size(); ++place) fold_into_sum(place, dtype);
}

GRADACCUM_INLINE std::shared_ptr<WindowGradients> WindowGradients::part(const std::vector<std::size_t>& places) {
  auto part = std::make_shared<WindowGradients>(std::vector<at::Tensor>());
  part->sums_ = sums_.part(places);
  part->factor_ = factor_;
  part->set_weights(first_weight_, total_weight_);
  return part;
}

GRADACCUM_INLINE std::shared_ptr<WindowGradients> WindowGradients::of_shards(const Shards& shards) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> places;
  std::vector<at::Tensor> own;
  for (auto place : sums_.places())
    if (shards.own_piece(place).size() > 0) places.push_back(place), own.push_back(shards.own(place));
  auto window = std::make_shared<WindowGradients>(own);
  for (std::size_t i = 0; i < places.size(); ++i)
    window->sums_.set(i, shards.part(places[i], shards.own_piece(places[i]), sums_[places[i]]),
                      sums_.is_apart(places[i]));
  window->set_weights(first_weight_, total_weight_);
  window->factor_ = factor_, window->applied_ = applied_, window->norm_before_clipping_ = norm_before_clipping_;
  if (must_be_finite()) window->verdict_ = found_inf();
  window->overflowed_ = overflowed_, window->judged_on_device_ = judged_on_device_;
  return window;
}

GRADACCUM_INLINE void WindowGradients::free() {
  for (auto& parameter : all_parameters()) parameter.mutable_grad().reset();
  close();
}

GRADACCUM_INLINE void WindowGradients::close() {
  closed_ = true;
  sums_ = {};
}

GRADACCUM_INLINE std::vector<at::Tensor> WindowGradients::parameters() const {
  check_open();
  std::vector<at::Tensor> with_gradient;
  for (auto place : sums_.places()) with_gradient.push_back(all_parameters()[place]);
  return with_gradient;
}

GRADACCUM_INLINE std::vector<at::Tensor> WindowGradients::raw() const {
  check_open();
  std::vector<at::Tensor> gradients;
  for (auto place : sums_.places()) gradients.push_back(sums_[place]);
  return gradients;
}

GRADACCUM_INLINE Multiplier WindowGradients::multiplier() const {
  auto factor = factor_;
  if (!applied_ && total_weight_ > 0) {
    factor.multiply(first_weight_);  // the seeds were divided by it
    factor.divide(total_weight_);
  }
  return product_of(factor);
}

GRADACCUM_INLINE std::vector<at::Tensor> WindowGradients::measured() {
  auto gradients = raw();
  const auto untouched = [](const SeenTensor& seen, const at::Tensor& gradient) { return seen.untouched(gradient); };
  if (norms_.defined() && std::equal(measured_.begin(), measured_.end(), gradients.begin(), gradients.end(), untouched))
    return gradients;
  norms_ = norms(gradients, 2);
  found_inf_.reset();
  overflowed_.reset();
  judged_on_device_.reset();
  measured_ = std::vector<SeenTensor>(gradients.begin(), gradients.end());
  return gradients;
}

GRADACCUM_INLINE at::Tensor WindowGradients::norm() {
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

GRADACCUM_INLINE at::Tensor WindowGradients::found_inf() {
  if (verdict_.defined()) return verdict_;
  if (closed_ && found_inf_.defined()) return found_inf_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (!found_inf_.defined()) found_inf_ = detail::found_inf(gradients, norms_);
  return found_inf_;
}

GRADACCUM_INLINE bool WindowGradients::overflowed() {
  if (judged_on_device()) overflowed_ = judged_on_device_.item<float>() != 0;
  if (closed_ || !must_be_finite()) return overflowed_.value_or(false);
  const auto found = found_inf();  // forgets the last answer if a gradient has changed
  if (!overflowed_) overflowed_ = found.item<float>() != 0;
  return *overflowed_;
}

GRADACCUM_INLINE at::Tensor WindowGradients::judge_on_device() { return judged_on_device_ = found_inf(); }

GRADACCUM_INLINE void WindowGradients::apply() {
  check_open();
  TORCH_CHECK(complete_,
              "Gradients: apply() and values() inside a window would mix multiplied sums with those to come; "
              "call them after backward, inside `if (optimizer.ready())`");
  at::NoGradGuard no_grad;
  if (must_be_finite()) verdict_ = found_inf();
  if (const auto by = multiplier(); !by.is_one()) multiply_(raw(), by);
  factor_ = requirement_of(factor_);
  applied_ = true;
  sums_.become_gradients();
}

}  // namespace gradaccum::detail
